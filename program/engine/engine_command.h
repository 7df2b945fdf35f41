/*
 * engine_command: the sub-commands that run the reference engine.
 */
#ifndef COX_PROGRAM_ENGINE_COMMAND_H
#define COX_PROGRAM_ENGINE_COMMAND_H

#include "program/cli/runner.h"

extern const struct cox_command cox_command_run;
extern const struct cox_command cox_command_generate;
extern const struct cox_command cox_command_eval;
extern const struct cox_command cox_command_node;

#endif
