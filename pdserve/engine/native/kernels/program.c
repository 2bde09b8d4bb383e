/* All layers of a decoder in one call, by the same threads: operations in order, on slots of one room.
 *
 * A slot holds [rows, width] activations; the slots lie one behind the other, so a slot is given by how many bytes of a row
 * lie before it: it begins at room + rows · slot.
 */
#include "kernels.h"

/* The numbers are those of program.py. */
enum { LINEAR, PACKED_LINEAR, NORM, GATE, ATTEND };

typedef struct {
    int64_t kind, from, to;
    int64_t more;          /* NORM: what is added to `from`; PACKED_LINEAR: room for activations as bytes; -1: nothing */
    const void *weight;    /* of a product, or of the norm of rows or heads, as the kernel takes it */
    const float *bias;
    int64_t outputs, width;
    int64_t number; /* PACKED_LINEAR: segments; GATE: its kind; ATTEND: the layer */
    int64_t turns;  /* ATTEND: which of the step's */
    float eps;
} Operation;

typedef struct {
    const Operation *operations;
    int64_t num_operations;
    uint8_t *room;
    int64_t rows;
    const Step *step;
    const View *views; /* of the layers */
    const float *const *turns;
} Program;

static void run_operation(const Program *program, const Operation *op, Team *team) {
    const int64_t rows = program->rows;
    act *from = (act *)(program->room + rows * op->from), *to = (act *)(program->room + rows * op->to);
    uint8_t *more = op->more < 0 ? NULL : program->room + rows * op->more;
    switch (op->kind) {
    case LINEAR: {
        Linear job = {from, op->weight, op->bias, to, rows, op->outputs, op->width};
        linear(&job, team);
        return;
    }
    case PACKED_LINEAR: {
        Packed job = {from, (Activations *)more, op->weight, op->bias, to, op->number, rows, op->outputs, op->width};
        packed_linear(&job, team);
        return;
    }
    case NORM: {
        Rows job = {from, (act *)more, op->weight, to, rows, op->width, op->eps, 0};
        norm(&job, team);
        return;
    }
    case GATE: {
        Rows job = {.x = from, .y = to, .rows = rows, .width = op->width, .kind = (int)op->number};
        gate(&job, team);
        return;
    }
    case ATTEND: {
        Layer job = {program->step, program->views + op->number, from, program->turns[op->turns], op->weight, to, op->number, op->eps};
        attend(&job, team);
        return;
    }
    }
}

static void run_program(const void *shared, Team *team) {
    const Program *program = shared;
    for (int64_t i = 0; i < program->num_operations; i++) run_operation(program, program->operations + i, team);
}

/* room: as many bytes a row as the slots take, all of them multiples of 64. */
API void pd_run(const Operation *operations, int64_t num_operations, void *room, int64_t rows, const Step *step, const View *views,
                const float *const *turns, int threads) {
    Program program = {operations, num_operations, room, rows, step, views, turns};
    run_as_team(run_program, &program, threads);
}
