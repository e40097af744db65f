/* Resize RGB bytes with Pillow's antialiased bilinear filter, to the bit: weights of float64 are rounded to 22 bits, and the result of the
   first pass to bytes. Products and sums must stay apart (-ffp-contract=off). */

#include <stdlib.h>

#define BITS 22
#define HALF (1 << (BITS - 1))

typedef int pixel __attribute__((vector_size(16)));

static double triangle(double distance)
{
    distance = distance < 0 ? -distance : distance;
    return distance < 1 ? 1 - distance : 0;
}

/* Return for each of `to` outputs the first source position, the number of positions and their weights, *step numbers in all; or 0. */
static int *weigh(long from, long to, long *step)
{
    const double scale = (double)from / to, reach = scale < 1 ? 1 : scale, inverse = 1 / reach;
    *step = 2 * (long)reach + 5;
    int *table = malloc(sizeof(int) * to * *step);
    for (long i = 0; table && i < to; i++) {
        const double centre = (i + 0.5) * scale;
        long first = centre - reach + 0.5, end = centre + reach + 0.5;
        int *weights = table + i * *step;
        double total = 0;
        first = first < 0 ? 0 : first;
        end = end > from ? from : end;
        for (long j = first; j < end; j++)
            total += triangle((j - centre + 0.5) * inverse);
        *weights++ = first;
        *weights++ = end - first;
        for (long j = first; j < end; j++)
            *weights++ = 0.5 + triangle((j - centre + 0.5) * inverse) / total * (1 << BITS);
    }
    return table;
}

static void resize_across(const unsigned char *source, long stride, long width, long height, pixel *line, const int *table, long step,
                          unsigned char *out, long new_width)
{
    for (long y = 0; y < height; y++, source += stride) {
        for (long x = 0; x < width; x++)
            line[x] = (pixel){source[3 * x], source[3 * x + 1], source[3 * x + 2]};
        for (long x = 0; x < new_width; x++, out += 3) {
            const int *weights = table + x * step;
            pixel sum = {HALF, HALF, HALF};
            for (int j = 0; j < weights[1]; j++)
                sum += line[weights[0] + j] * weights[2 + j];
            sum >>= BITS;
            out[0] = sum[0], out[1] = sum[1], out[2] = sum[2];
        }
    }
}

static void resize_down(const unsigned char *source, long stride, long bytes, int *line, const int *table, long step, unsigned char *out,
                        long new_height)
{
    for (long y = 0; y < new_height; y++, table += step, out += bytes) {
        for (long i = 0; i < bytes; i++)
            line[i] = HALF;
        for (int j = 0; j < table[1]; j++) {
            const unsigned char *row = source + (table[0] + j) * stride;
            const int weight = table[2 + j];
            for (long i = 0; i < bytes; i++)
                line[i] += row[i] * weight;
        }
        for (long i = 0; i < bytes; i++)
            out[i] = line[i] >> BITS;
    }
}

/* image: rows that begin stride bytes apart; out: rows without gaps; down_first: which pass is the first one. Returns 0 where there is
   no memory. */
int mtrain_resize_rgb(const unsigned char *image, long stride, long width, long height, unsigned char *out, long new_width, long new_height,
                      int down_first)
{
    const long longest = width > new_width ? width : new_width, between = down_first ? width * new_height : new_width * height;
    long step_x, step_y;
    int *across = weigh(width, new_width, &step_x), *down = weigh(height, new_height, &step_y), *line = malloc(sizeof(pixel) * longest);
    unsigned char *made = malloc(3 * between);
    const int done = across && down && line && made;
    if (done && down_first) {
        resize_down(image, stride, 3 * width, line, down, step_y, made, new_height);
        resize_across(made, 3 * width, width, new_height, (pixel *)line, across, step_x, out, new_width);
    } else if (done) {
        resize_across(image, stride, width, height, (pixel *)line, across, step_x, made, new_width);
        resize_down(made, 3 * new_width, 3 * new_width, line, down, step_y, out, new_height);
    }
    free(across), free(down), free(line), free(made);
    return done;
}
