/*
 * engine_gate: the state of the engine, and whether steps are let in. The recovery commands that
 * move it are in recover.c, with the diagram; inits and deaths move it through the functions here.
 *
 * Threads: any; recover_lock of the executor protects the state.
 * Blocks: nothing.
 */
#ifndef COX_COORDINATOR_ENGINE_GATE_H
#define COX_COORDINATOR_ENGINE_GATE_H

#include <coxswain/requests.h>

/* With recover_lock: the state, BUSY apart. A caller that has seen a death sees the state it
 * causes, whether or not it was reported. */
enum cox_engine_state cox_executor_look_state(struct cox_executor *executor);
/* An init has succeeded. unless_paused: PAUSE and READY stay. */
void cox_executor_set_normal(struct cox_executor *executor, bool unless_paused);
/* An init was published. */
void cox_executor_note_sent(struct cox_executor *executor);
/* A rank was replaced; its process knows no init. */
void cox_executor_note_replaced(struct cox_executor *executor);
/* A rank has died, as the shared state says: NORMAL ends. */
void cox_executor_note_death(struct cox_executor *executor);
/* Checks whether a step may be published now, with submit_lock of the execute channel held. Returns
 * 0; COX_STATE. */
int cox_executor_admit_step(struct cox_executor *executor, struct cox_error *err);

#endif
