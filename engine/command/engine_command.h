/*
 * engine_command: the sub-commands that run the reference engine themselves. As command.h.
 */
#ifndef COX_ENGINE_COMMAND_H
#define COX_ENGINE_COMMAND_H

int cox_command_run(int argc, char **argv);
int cox_command_generate(int argc, char **argv);
int cox_command_eval(int argc, char **argv);

#endif
