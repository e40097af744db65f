/* BatchNorm, alone or followed by SiLU, for float32 on the CPU.

   An array holds pixels x channels numbers, the channels of a pixel beside each other (channels-last layout); pixels of a
   gradient may be `stride` numbers apart. Narrow layers are read as rows of several pixels. The numbers of a column are
   added in float32 over a few dozen rows, and those sums in float64, so that sums are exact to rounding whatever the
   size. The rows are cut into chunks whose number does not depend on the threads, and so do the results not.
   Every function returns 0, or 1 if there is no memory. */

#include "common.h"

enum { ROWS = 64, WIDTH = 256, CHUNKS = 16, SMALL = 65536 };

typedef struct {
    const float *x, *dy;
    float *out;
    long pixels, channels, stride;
    long pixels_per_row, pixels_per_chunk, chunks;
    float *columns[3]; /* numbers per channel, repeated for each pixel of a row */
    double *sums;
    int silu;
} Work;

/* ------------------------------------------------------------------------------------------------------------ work */
static Work work_on(const float *x, long pixels, long channels) {
    Work work = {.x = x, .pixels = pixels, .channels = channels, .stride = channels};
    work.pixels_per_row = channels < WIDTH ? WIDTH / channels : 1;
    long block = ROWS * work.pixels_per_row, blocks = (pixels + block - 1) / block;
    work.pixels_per_chunk = (blocks + CHUNKS - 1) / CHUNKS * block;
    work.chunks = (pixels + work.pixels_per_chunk - 1) / work.pixels_per_chunk;
    return work;
}

/* Make room for `sums` numbers per channel and chunk, and for the columns. */
static int reserve(Work *work, long sums) {
    long width = work->pixels_per_row * work->channels;
    work->columns[0] = malloc(3 * width * sizeof(float));
    work->sums = calloc(work->chunks * work->channels * sums + 1, sizeof(double));
    if (work->columns[0] == NULL || work->sums == NULL) return 1;
    work->columns[1] = work->columns[0] + width;
    work->columns[2] = work->columns[1] + width;
    return 0;
}

static int release(Work *work, int failed) {
    free(work->columns[0]);
    free(work->sums);
    return failed;
}

static int run_chunks(const Work *work, Step step, int threads) {
    return run(work, step, work->chunks, work->pixels * work->channels < SMALL ? 1 : threads);
}

/* Repeat the numbers of the first pixel's channels for the other pixels of a row. */
static void repeat(Work *work) {
    for (int i = 0; i < 3; i++)
        for (long k = 1; k < work->pixels_per_row; k++)
            memcpy(work->columns[i] + k * work->channels, work->columns[i], work->channels * sizeof(float));
}

static long chunk_end(const Work *work, long chunk) {
    long end = (chunk + 1) * work->pixels_per_chunk;
    return end < work->pixels ? end : work->pixels;
}

/* Add the columns of each channel to the chunk's sum `which`. */
static void fold(const Work *work, const float *columns, double *sums) {
    long C = work->channels;
    for (long k = 0; k < work->pixels_per_row; k++)
        for (long c = 0; c < C; c++) sums[c] += columns[k * C + c];
}

/* ----------------------------------------------------------------------------------------------------- statistics */
/* A block's mean m is rounded to float32. Its sum of (x - m)^2, and m * (2 * sum - count * m), which makes it the sum of
   x^2, are added up apart: the second is large where the mean is. */
static int statistics_step(const void *given, long chunk) {
    const Work *work = given;
    long C = work->channels, row = work->pixels_per_row, width = row * C, end = chunk_end(work, chunk);
    double *sums = work->sums + chunk * 3 * C;
    float *restrict first = malloc(2 * width * sizeof(float)), *restrict second = first + width;
    if (first == NULL) return 1;
    for (long start = chunk * work->pixels_per_chunk; start < end; start += ROWS * row) {
        long stop = least(start + ROWS * row, end), count = stop - start;
        memset(first, 0, 2 * width * sizeof(float));
        for (long p = start; p < stop; p += row) {
            const float *restrict x = work->x + p * C;
            long n = least(row, stop - p) * C;
            for (long j = 0; j < n; j++) first[j] += x[j];
        }
        for (long c = 0; c < C; c++) {
            double sum = 0;
            for (long k = 0; k < row; k++) sum += first[k * C + c];
            float mean = (float)(sum / count);
            for (long k = 0; k < row; k++) first[k * C + c] = mean;
            sums[c] += sum;
            sums[2 * C + c] += mean * (2 * sum - count * (double)mean);
        }
        for (long p = start; p < stop; p += row) {
            const float *restrict x = work->x + p * C;
            long n = least(row, stop - p) * C;
            for (long j = 0; j < n; j++) second[j] += (x[j] - first[j]) * (x[j] - first[j]);
        }
        fold(work, second, sums + C);
    }
    free(first);
    return 0;
}

/* Write mean and biased variance of each channel. */
int mtrain_norm_statistics(const float *x, long pixels, long channels, double *mean, double *variance, int threads) {
    Work work = work_on(x, pixels, channels);
    if (reserve(&work, 3) || run_chunks(&work, statistics_step, threads)) return release(&work, 1);
    for (long c = 0; c < channels; c++) {
        double sums[3] = {0, 0, 0};
        for (long k = 0; k < work.chunks; k++)
            for (int i = 0; i < 3; i++) sums[i] += work.sums[(k * 3 + i) * channels + c];
        mean[c] = sums[0] / pixels;
        double between = sums[2] / pixels - mean[c] * mean[c];
        variance[c] = sums[1] / pixels + (between < 0 ? 0 : between);
    }
    return release(&work, 0);
}

/* ----------------------------------------------------------------------------------------------------------- output */
static int output_step(const void *given, long chunk) {
    const Work *work = given;
    long C = work->channels, row = work->pixels_per_row, end = chunk_end(work, chunk);
    const float *restrict scale = work->columns[0], *restrict shift = work->columns[1];
    for (long p = chunk * work->pixels_per_chunk; p < end; p += row) {
        const float *restrict x = work->x + p * C;
        float *restrict y = work->out + p * C;
        long n = least(row, end - p) * C;
        if (work->silu)
            for (long j = 0; j < n; j++) {
                float z = x[j] * scale[j] + shift[j];
                y[j] = z * sigmoid(z);
            }
        else
            for (long j = 0; j < n; j++) y[j] = x[j] * scale[j] + shift[j];
    }
    return 0;
}

static void set_scale(Work *work, const double *mean, const double *inverse, const float *weight, const float *bias) {
    for (long c = 0; c < work->channels; c++) {
        double scale = weight[c] * inverse[c];
        work->columns[0][c] = (float)scale;
        work->columns[1][c] = (float)(bias[c] - mean[c] * scale);
        work->columns[2][c] = (float)mean[c];
    }
    repeat(work);
}

/* Write y = (x - mean) * inverse * weight + bias, or SiLU of it. */
int mtrain_norm_output(const float *x, long pixels, long channels, const double *mean, const double *inverse,
                       const float *weight, const float *bias, int silu, float *y, int threads) {
    Work work = work_on(x, pixels, channels);
    if (reserve(&work, 0)) return release(&work, 1);
    set_scale(&work, mean, inverse, weight, bias);
    work.out = y;
    work.silu = silu;
    return release(&work, run_chunks(&work, output_step, threads));
}

/* -------------------------------------------------------------------------------------------------- gradients: sums */
static void add_gradients(const Work *work, long pixel, long n, float *restrict sum, float *restrict product) {
    const float *restrict x = work->x + pixel * work->channels, *restrict dy = work->dy + pixel * work->stride;
    const float *restrict scale = work->columns[0], *restrict shift = work->columns[1], *restrict mean = work->columns[2];
    if (work->silu) {
        float *restrict dz = work->out + pixel * work->channels;
        for (long j = 0; j < n; j++) {
            float z = x[j] * scale[j] + shift[j], s = sigmoid(z), d = dy[j] * (s + z * s * (1.0f - s));
            dz[j] = d;
            sum[j] += d;
            product[j] += d * (x[j] - mean[j]);
        }
    } else
        for (long j = 0; j < n; j++) {
            sum[j] += dy[j];
            product[j] += dy[j] * (x[j] - mean[j]);
        }
}

static int sums_step(const void *given, long chunk) {
    const Work *work = given;
    long C = work->channels, row = work->pixels_per_row, width = row * C, end = chunk_end(work, chunk);
    long step = work->stride == C ? row : 1;
    double *sums = work->sums + chunk * 2 * C;
    float *sum = malloc(2 * width * sizeof(float)), *product = sum + width;
    if (sum == NULL) return 1;
    for (long start = chunk * work->pixels_per_chunk; start < end; start += ROWS * row) {
        long stop = least(start + ROWS * row, end);
        memset(sum, 0, 2 * width * sizeof(float));
        for (long p = start; p < stop; p += step) {
            long at = (p - start) % row * C;
            add_gradients(work, p, least(step, stop - p) * C, sum + at, product + at);
        }
        fold(work, sum, sums);
        fold(work, product, sums + C);
    }
    free(sum);
    return 0;
}

/* Write the sums of dz and of dz * (x - mean) * inverse to sums[0..C] and sums[C..2C]. dz is the gradient of the
   normalised output: dy, or with SiLU what is left at `dz`. */
int mtrain_norm_gradient_sums(const float *x, const float *dy, long stride, long pixels, long channels, const double *mean,
                              const double *inverse, const float *weight, const float *bias, int silu, float *dz,
                              double *sums, int threads) {
    Work work = work_on(x, pixels, channels);
    if (reserve(&work, 2)) return release(&work, 1);
    set_scale(&work, mean, inverse, weight, bias);
    work.dy = dy;
    work.stride = stride;
    work.out = dz;
    work.silu = silu;
    if (run_chunks(&work, sums_step, threads)) return release(&work, 1);
    for (long c = 0; c < channels; c++) {
        double sum = 0, product = 0;
        for (long k = 0; k < work.chunks; k++) {
            sum += work.sums[k * 2 * channels + c];
            product += work.sums[(k * 2 + 1) * channels + c];
        }
        sums[c] = sum;
        /* x - mean was taken with a rounded mean. */
        sums[channels + c] = (product - sum * (mean[c] - (double)work.columns[2][c])) * inverse[c];
    }
    return release(&work, 0);
}

/* ------------------------------------------------------------------------------------------------- gradients: input */
static int input_step(const void *given, long chunk) {
    const Work *work = given;
    long C = work->channels, end = chunk_end(work, chunk), row = work->stride == C ? work->pixels_per_row : 1;
    const float *restrict a = work->columns[0], *restrict b = work->columns[1], *restrict c = work->columns[2];
    for (long p = chunk * work->pixels_per_chunk; p < end; p += row) {
        const float *restrict x = work->x + p * C;
        float *out = work->out + p * C;
        const float *dz = work->dy + p * work->stride; /* may be `out` itself */
        long n = least(row, end - p) * C;
#pragma GCC ivdep
        for (long j = 0; j < n; j++) out[j] = dz[j] * a[j] + (x[j] * b[j] + c[j]);
    }
    return 0;
}

/* Write dx = (dz - means[0..C] - xhat * means[C..2C]) * weight * inverse; dx may be dz where both have no gaps. */
int mtrain_norm_input_gradient(const float *x, const float *dz, long stride, long pixels, long channels, const double *mean,
                               const double *inverse, const float *weight, const double *means, float *dx, int threads) {
    Work work = work_on(x, pixels, channels);
    if (reserve(&work, 0)) return release(&work, 1);
    for (long c = 0; c < channels; c++) {
        double scale = weight[c] * inverse[c], slope = scale * inverse[c] * means[channels + c];
        work.columns[0][c] = (float)scale;
        work.columns[1][c] = (float)-slope;
        work.columns[2][c] = (float)(slope * mean[c] - scale * means[c]);
    }
    repeat(&work);
    work.dy = dz;
    work.stride = stride;
    work.out = dx;
    return release(&work, run_chunks(&work, input_step, threads));
}
