/* What the kernels share: work divided among threads, and the sigmoid. */

#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_THREADS = 16 };

/* One part of a work; returns 0, or 1 if there is no memory. */
typedef int (*Step)(const void *work, long part);

typedef struct {
    const void *work;
    Step step;
    long first, by, parts;
    int failed;
} Share;

static void *run_share(void *given) {
    Share *share = given;
    for (long part = share->first; part < share->parts; part += share->by) share->failed |= share->step(share->work, part);
    return NULL;
}

/* Do all parts, with at most so many threads. Which thread does a part must not change its result. */
static int run(const void *work, Step step, long parts, long threads) {
    pthread_t started[MOST_THREADS];
    Share shares[MOST_THREADS];
    long count = threads < parts ? threads : parts, running = 1;
    int failed = 0;
    count = count < 1 ? 1 : count > MOST_THREADS ? MOST_THREADS : count;
    for (long i = 0; i < count; i++) shares[i] = (Share){work, step, i, count, parts, 0};
    while (running < count && pthread_create(&started[running], NULL, run_share, &shares[running]) == 0) running++;
    for (long i = running; i < count; i++) run_share(&shares[i]);
    run_share(&shares[0]);
    for (long i = 1; i < running; i++) pthread_join(started[i], NULL);
    for (long i = 0; i < count; i++) failed |= shares[i].failed;
    return failed;
}

static inline long least(long a, long b) { return a < b ? a : b; }

/* 1 / (1 + exp(-z)). exp is its Taylor series of degree 7 within ln 2 / 2 of a multiple of ln 2, relative error 1e-7;
   ln 2 is cut into a short number and its rest. Beyond 87 exp leaves float32. NaN stays NaN: comparisons with it fail. */
static inline float sigmoid(float z) {
    float t = -z;
    t = t > 87.0f ? 87.0f : t;
    t = t < -87.0f ? -87.0f : t;
    float shifted = t * 1.44269504f + 12582912.0f; /* 1.5 * 2^23: rounds to an integer, and holds it in its low bits */
    float n = shifted - 12582912.0f, r = t - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.0f / 5040;
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    unsigned bits;
    memcpy(&bits, &shifted, sizeof bits);
    bits = (bits + 127) << 23;
    float power;
    memcpy(&power, &bits, sizeof power);
    return 1.0f / (1.0f + p * power);
}
