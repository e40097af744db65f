/* Gradient of a convolution's weight, for float32 in channels-last layout on the CPU, by one thread.

   For each row of the kernel it is a matrix product over all pixels of the output: window x gradient. The sums of a tile
   of the weight stay in registers over some pixels. Products are added in the order of the pixels, as oneDNN adds them on
   processors with AVX2: the results have the same bits. */

#include "common.h"

enum { HALF = 8, LANES = 2 * HALF, TILE = 6, PIXELS = 160 };
typedef float Half __attribute__((vector_size(HALF * sizeof(float))));
typedef struct { Half low, high; } Lanes;

/* Add TILE numbers of a window times LANES gradients, over lines of `count` pixels that are `step` numbers apart. */
static void add_products(const float *x, long line, long step, const Lanes *dy, long dy_line, long lines, long count,
                         Lanes *sums) {
    Half low[TILE], high[TILE];
    for (int i = 0; i < TILE; i++) low[i] = sums[i].low, high[i] = sums[i].high;
    for (long r = 0; r < lines; r++) {
        const float *at = x + r * line;
        for (const Lanes *d = dy + r * dy_line, *end = d + count; d < end; d++, at += step)
            for (int i = 0; i < TILE; i++) {
                low[i] += at[i] * d->low;
                high[i] += at[i] * d->high;
            }
    }
    for (int i = 0; i < TILE; i++) sums[i].low = low[i], sums[i].high = high[i];
}

/* The arrays are x (images, height, width, inputs), dy (images, out_height, out_width, outputs), and the result dw
   (outputs, side, side, inputs). Returns 0, or 1 if there is no memory. */
int mtrain_convolution_weight_gradient(const float *x, const float *dy, float *dw, long images, long inputs, long height,
                                       long width, long outputs, long out_height, long out_width, long side, long stride,
                                       long padding) {
    long window = side * inputs, tiled = (window + TILE - 1) / TILE * TILE, step = stride * inputs;
    long across = least(out_width, PIXELS), down = PIXELS / across, lines = (down - 1) * stride + side;
    long length = (width + 2 * padding) * inputs;
    size_t gradients = down * across * sizeof(Lanes), sums_size = side * tiled * sizeof(Lanes);
    size_t rows_size = (lines * length + TILE) * sizeof(float);
    char *memory = aligned_alloc(64, (gradients + sums_size + rows_size + 63) / 64 * 64);
    if (memory == NULL) return 1;
    Lanes *block = (Lanes *)memory, *sums = block + down * across;
    float *rows = (float *)(sums + side * tiled); /* of the input, with zeros for the padding */
    memset(memory, 0, gradients + sums_size + rows_size);
    for (long first = 0; first < outputs; first += LANES) {
        long lanes = least(LANES, outputs - first);
        memset(sums, 0, sums_size);
        for (long part = 0; part < images * out_height; part += least(down, out_height - part % out_height)) {
            long image = part / out_height, top = part % out_height, here = least(down, out_height - top);
            for (long i = 0; i < (here - 1) * stride + side; i++) {
                long y = top * stride - padding + i;
                float *row = rows + i * length + padding * inputs;
                if (y < 0 || y >= height) memset(row, 0, width * inputs * sizeof(float));
                else memcpy(row, x + (image * height + y) * width * inputs, width * inputs * sizeof(float));
            }
            for (long left = 0; left < out_width; left += across) {
                long wide = least(across, out_width - left);
                for (long r = 0; r < here; r++)
                    for (long p = 0; p < wide; p++)
                        memcpy(block + r * across + p, dy + ((part + r) * out_width + left + p) * outputs + first,
                               lanes * sizeof(float));
                for (long k = 0; k < side; k++)
                    for (long j = 0; j < tiled; j += TILE)
                        add_products(rows + k * length + left * step + j, stride * length, step, block, across, here, wide,
                                     sums + k * tiled + j);
            }
        }
        for (long i = 0; i < lanes; i++)
            for (long k = 0; k < side; k++)
                for (long j = 0; j < window; j++)
                    dw[((first + i) * side + k) * window + j] = ((const float *)(sums + k * tiled + j))[i];
    }
    free(memory);
    return 0;
}
