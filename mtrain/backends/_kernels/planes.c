/* BatchNorm, alone or followed by SiLU, for float32 arrays (batch, channels, size) on the CPU: the pixels of a channel of
   an image lie beside each other.

   A channel is computed from its statistics to its output in one go, while it is in the processor's cache. Its numbers are
   added in float32 in lanes over blocks, and the blocks' sums in float64, so that sums are exact to rounding whatever the
   size. A channel is one thread's, so that results do not depend on how many there are.
   Every function returns 0. */

#include "common.h"

enum { BLOCK = 1024, SMALL = 65536 };

typedef struct {
    const float *x, *dy, *weight, *bias;
    float *out, *weight_gradient, *bias_gradient;
    long batch, channels, size;
    double eps, *mean, *variance, *inverse;
    float *running_mean, *running_variance;
    double take, correction;
    int silu;
} Planes;

static int run_channels(const Planes *planes, Step step, int threads) {
    long numbers = planes->batch * planes->channels * planes->size;
    return run(planes, step, planes->channels, numbers < SMALL ? 1 : threads);
}

/* 16 numbers that compilers keep in one register, or in the few that hold as many. */
typedef float Lanes __attribute__((vector_size(64)));

static inline Lanes read_lanes(const float *x) {
    Lanes lanes;
    memcpy(&lanes, x, sizeof lanes);
    return lanes;
}

/* Read n < 16 numbers; the other lanes hold `rest`. */
static inline Lanes read_few(const float *x, long n, float rest) {
    float few[16];
    for (int k = 0; k < 16; k++) few[k] = rest;
    memcpy(few, x, n * sizeof(float));
    return read_lanes(few);
}

static inline double added(Lanes a, Lanes b, Lanes c, Lanes d) {
    float lanes[16];
    double sum[4] = {0, 0, 0, 0};
    Lanes all = (a + b) + (c + d);
    memcpy(lanes, &all, sizeof lanes);
    for (int k = 0; k < 16; k += 4)
        for (int i = 0; i < 4; i++) sum[i] += lanes[k + i];
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

/* A block's mean m is rounded to float32. Added are its sum, its sum of (x - m)^2, and m * (2 * sum - n * m), which makes
   the second the sum of x^2 and is large where the mean is. */
static void add_moments(const float *x, long n, double *sums) {
    Lanes a = {0}, b = {0}, c = {0}, d = {0}, none = {0};
    long j;
    for (j = 0; j + 64 <= n; j += 64) {
        a += read_lanes(x + j);
        b += read_lanes(x + j + 16);
        c += read_lanes(x + j + 32);
        d += read_lanes(x + j + 48);
    }
    for (; j + 16 <= n; j += 16) a += read_lanes(x + j);
    if (j < n) b += read_few(x + j, n - j, 0);
    double sum = added(a, b, c, d);
    float mean = (float)(sum / n);
    a = b = c = d = none;
    for (j = 0; j + 64 <= n; j += 64) {
        Lanes e = read_lanes(x + j) - mean, f = read_lanes(x + j + 16) - mean;
        Lanes g = read_lanes(x + j + 32) - mean, h = read_lanes(x + j + 48) - mean;
        a += e * e;
        b += f * f;
        c += g * g;
        d += h * h;
    }
    for (; j + 16 <= n; j += 16) {
        Lanes e = read_lanes(x + j) - mean;
        a += e * e;
    }
    if (j < n) {
        Lanes e = read_few(x + j, n - j, mean) - mean;
        b += e * e;
    }
    sums[0] += sum;
    sums[1] += added(a, b, c, d);
    sums[2] += mean * (2 * sum - n * (double)mean);
}

static void take_statistics(const Planes *planes, long channel) {
    double sums[3] = {0, 0, 0}, count = (double)planes->batch * planes->size;
    for (long b = 0; b < planes->batch; b++) {
        const float *x = planes->x + (b * planes->channels + channel) * planes->size;
        for (long j = 0; j < planes->size; j += BLOCK) add_moments(x + j, least(BLOCK, planes->size - j), sums);
    }
    double mean = sums[0] / count, between = sums[2] / count - mean * mean;
    /* NaN stays NaN: comparisons with it fail. */
    planes->variance[channel] = sums[1] / count + (between < 0 ? 0 : between);
    planes->mean[channel] = mean;
    planes->inverse[channel] = 1 / sqrt(planes->variance[channel] + planes->eps);
    double keep = 1 - planes->take, variance = planes->variance[channel] * planes->correction;
    planes->running_mean[channel] = (float)(keep * planes->running_mean[channel] + planes->take * mean);
    planes->running_variance[channel] = (float)(keep * planes->running_variance[channel] + planes->take * variance);
}

/* z = (x - m) * scale + shift, where m is the mean rounded to float32: exact also where the mean is large. */
static void set_scale(const Planes *planes, long channel, float *scale, float *shift) {
    double factor = planes->weight[channel] * planes->inverse[channel], mean = planes->mean[channel];
    *scale = (float)factor;
    *shift = (float)(planes->bias[channel] - (mean - (double)(float)mean) * factor);
}

static int forward_step(const void *given, long channel) {
    const Planes *planes = given;
    take_statistics(planes, channel);
    float mean = (float)planes->mean[channel], scale, shift;
    set_scale(planes, channel, &scale, &shift);
    for (long b = 0; b < planes->batch; b++) {
        long start = (b * planes->channels + channel) * planes->size;
        const float *restrict x = planes->x + start;
        float *restrict y = planes->out + start;
        if (planes->silu)
            for (long j = 0; j < planes->size; j++) {
                float z = (x[j] - mean) * scale + shift;
                y[j] = z * sigmoid(z);
            }
        else
            for (long j = 0; j < planes->size; j++) y[j] = (x[j] - mean) * scale + shift;
    }
    return 0;
}

/* Normalise every channel, then SiLU where asked. Written are y, and for each channel mean, biased variance, and
   inverse = 1 / sqrt(variance + eps). The running statistics move by the share `take` towards mean and
   variance * correction. */
int mtrain_planes_forward(const float *x, long batch, long channels, long size, double eps, const float *weight,
                          const float *bias, int silu, float *y, double *mean, double *variance, double *inverse,
                          float *running_mean, float *running_variance, double take, double correction, int threads) {
    Planes planes = {.running_mean = running_mean, .running_variance = running_variance, .take = take,
                     .correction = correction, .x = x, .weight = weight, .bias = bias, .out = y, .batch = batch, .channels = channels, .size = size,
                     .eps = eps, .mean = mean, .variance = variance, .inverse = inverse, .silu = silu};
    return run_channels(&planes, forward_step, threads);
}

/* Add the sums of dz and of dz * (x - mean); dz, the gradient of the normalised numbers, is written to `out` with SiLU. */
static void add_gradients(const Planes *planes, long start, long n, long channel, double *sums) {
    const float *restrict x = planes->x + start, *restrict dy = planes->dy + start;
    float mean = (float)planes->mean[channel];
    if (planes->silu) {
        float scale, shift;
        set_scale(planes, channel, &scale, &shift);
        float *restrict dz = planes->out + start;
        for (long j = 0; j < n; j++) {
            float z = (x[j] - mean) * scale + shift, s = sigmoid(z);
            dz[j] = dy[j] * (s + z * s * (1.0f - s));
        }
        dy = dz;
    }
    Lanes a = {0}, b = {0}, c = {0}, d = {0};
    long j;
    for (j = 0; j + 32 <= n; j += 32) {
        Lanes e = read_lanes(dy + j), f = read_lanes(dy + j + 16);
        a += e;
        b += f;
        c += e * (read_lanes(x + j) - mean);
        d += f * (read_lanes(x + j + 16) - mean);
    }
    for (; j < n; j += 16) {
        long few = least(16, n - j);
        Lanes e = few < 16 ? read_few(dy + j, few, 0) : read_lanes(dy + j);
        Lanes f = few < 16 ? read_few(x + j, few, mean) : read_lanes(x + j);
        a += e;
        c += e * (f - mean);
    }
    Lanes none = {0};
    sums[0] += added(a, b, none, none);
    sums[1] += added(c, d, none, none);
}

static int backward_step(const void *given, long channel) {
    const Planes *planes = given;
    double sums[2] = {0, 0}, mean = planes->mean[channel], inverse = planes->inverse[channel];
    for (long b = 0; b < planes->batch; b++) {
        long start = (b * planes->channels + channel) * planes->size;
        for (long j = 0; j < planes->size; j += BLOCK)
            add_gradients(planes, start + j, least(BLOCK, planes->size - j), channel, sums);
    }
    sums[1] = (sums[1] - sums[0] * (mean - (double)(float)mean)) * inverse; /* x - mean was taken with a rounded mean */
    planes->bias_gradient[channel] = (float)sums[0];
    planes->weight_gradient[channel] = (float)sums[1];
    /* dx = (dz - mean(dz) - xhat * mean(dz * xhat)) * weight * inverse, as dz * a + ((x - m) * b + c). */
    double count = (double)planes->batch * planes->size, scale = planes->weight[channel] * inverse;
    double slope = scale * inverse * sums[1] / count;
    float m = (float)mean, a = (float)scale, b = (float)-slope;
    float c = (float)(slope * (mean - (double)m) - scale * sums[0] / count);
    for (long image = 0; image < planes->batch; image++) {
        long start = (image * planes->channels + channel) * planes->size;
        const float *restrict x = planes->x + start;
        float *out = planes->out + start;
        const float *dz = planes->silu ? out : planes->dy + start;
#pragma GCC ivdep
        for (long j = 0; j < planes->size; j++) out[j] = dz[j] * a + ((x[j] - m) * b + c);
    }
    return 0;
}

/* Write the gradients of x, weight and bias; mean and inverse are those that the forward pass wrote. */
int mtrain_planes_backward(const float *x, const float *dy, long batch, long channels, long size, const float *weight,
                           const float *bias, int silu, double *mean, double *inverse, float *dx, float *weight_gradient,
                           float *bias_gradient, int threads) {
    Planes planes = {.x = x, .dy = dy, .weight = weight, .bias = bias, .out = dx, .weight_gradient = weight_gradient,
                     .bias_gradient = bias_gradient, .batch = batch, .channels = channels, .size = size, .mean = mean,
                     .inverse = inverse, .silu = silu};
    return run_channels(&planes, backward_step, threads);
}
