/* Dropout for float32 arrays (batch, size) on the CPU, with the words of core/network/noise.py, whose constants these are.

   Words are made where they are used, so that no mask is kept for the backward pass: it calls the same function again. */

#include "common.h"

typedef struct {
    const float *x;
    const int *keys;
    float *out, scale;
    long size;
    unsigned layer, least_kept;
} Dropout;

static inline unsigned mix(unsigned x) {
    x = (x ^ x >> 16) * 0x21f0aaadu;
    x = (x ^ x >> 15) * 0x735a2d97u;
    return x ^ x >> 15;
}

static int apply_step(const void *given, long sample) {
    const Dropout *dropout = given;
    const float *restrict x = dropout->x + sample * dropout->size;
    float *restrict out = dropout->out + sample * dropout->size;
    unsigned own = mix((unsigned)dropout->keys[sample] ^ dropout->layer), least_kept = dropout->least_kept;
    float scale = dropout->scale;
    long size = dropout->size;
    for (long j = 0; j < size; j++) {
        unsigned word = mix(mix((unsigned)j) ^ own) & 0x7fffffffu;
        out[j] = x[j] * (word >= least_kept ? scale : 0.0f); /* a product, so that infinity times 0 is no number */
    }
    return 0;
}

/* Write x * scale where the word is `least_kept` or more, and x * 0 elsewhere. Returns 0. */
int mtrain_dropout_apply(const float *x, const int *keys, long batch, long size, long layer, long least_kept, double scale,
                         float *out, int threads) {
    Dropout dropout = {x, keys, out, (float)scale, size, (unsigned)layer, (unsigned)least_kept};
    return run(&dropout, apply_step, batch, batch * size < 65536 ? 1 : threads);
}
