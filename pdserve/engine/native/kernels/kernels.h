/* What each kernel takes: from Python one by one (pd_…), or of a whole decoder in one call (program.c). */
#pragma once
#include "threads.h"

/* linear.c */
typedef struct {
    const act *x;
    const uint32_t *w;
    const float *bias;
    act *y;
    int64_t rows, outputs, width;
} Linear;

/* Rows of one format; `rows` has as many addresses as there are outputs, the last again until strips are whole. */
typedef struct {
    const uint8_t *const *rows;
    int64_t kind, outputs;
} Segment;

typedef struct Activations Activations;

/* packed.c */
typedef struct {
    const act *x;
    Activations *quantised;
    const Segment *segments;
    const float *bias;
    act *y;
    int64_t num_segments, rows, outputs, width;
} Packed;

/* rows.c */
typedef struct {
    act *x;
    const act *more;
    const float *weight;
    act *y;
    int64_t rows, width;
    float eps;
    int kind;
} Rows;

/* attention.c */
typedef struct {
    int64_t first_row;  /* of the step's tokens */
    int64_t num_tokens; /* 1 where the task is a part of one */
    int64_t position;   /* of the first token */
    int64_t table;      /* where its sequence's block ids begin */
    int64_t begin, end; /* keys: whole spans, but for the sequence's end and the window's begin */
    int64_t partial;    /* where a part's result goes; -1: this is all, and goes to `out` */
} Task;

typedef struct {
    int64_t row, first_partial, num_partials;
} Merge;

/* One step, the same for all layers. */
typedef struct {
    uint16_t *pool;
    const int64_t *slots; /* [tokens]: block · block size + offset */
    const int32_t *tables;
    float *partials; /* [partials, heads, head dim + 2] */
    act *queries;    /* [tokens, heads · head dim] */
    int64_t num_tokens, layers, kv_heads, group, head_dim, block_size;
    float scale, softcap;
} Step;

/* What layers with one window see of it; 0: they see all. */
typedef struct {
    int64_t window;
    const Task *tasks;
    int64_t num_tasks;
    const Merge *merges;
    int64_t num_merges;
} View;

/* One layer of it. */
typedef struct {
    const Step *step;
    const View *view;
    const act *projected;
    const float *turns; /* [tokens, head dim / 2] cosine and sine, scaled */
    const float *norm;  /* [heads + kv heads, head dim] or NULL */
    act *out;           /* [tokens, heads · head dim] */
    int64_t layer;
    float eps;
} Layer;

void linear(const Linear *job, Team *team);
void packed_linear(const Packed *job, Team *team);
void norm(const Rows *job, Team *team);
void gate(const Rows *job, Team *team);
void attend(const Layer *job, Team *team);
