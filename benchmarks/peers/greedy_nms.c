/* Greedy suppression, box by box, as torchvision's operator for CPUs works; used where torchvision cannot be installed.
   boxes: n x 4 corners, best score first; kept: receives the indices that remain. Returns their number. */
#include <stdlib.h>

long greedy_nms(const float *boxes, long n, float threshold, long *kept)
{
    char *dead = calloc(n ? n : 1, 1);
    float *areas = malloc((n ? n : 1) * sizeof *areas);
    long count = 0;
    for (long i = 0; i < n; i++)
        areas[i] = (boxes[4 * i + 2] - boxes[4 * i]) * (boxes[4 * i + 3] - boxes[4 * i + 1]);
    for (long i = 0; i < n; i++) {
        if (dead[i])
            continue;
        kept[count++] = i;
        const float *a = boxes + 4 * i;
        for (long j = i + 1; j < n; j++) {
            const float *b = boxes + 4 * j;
            float w = (a[2] < b[2] ? a[2] : b[2]) - (a[0] > b[0] ? a[0] : b[0]);
            float h = (a[3] < b[3] ? a[3] : b[3]) - (a[1] > b[1] ? a[1] : b[1]);
            float both = (w > 0 ? w : 0) * (h > 0 ? h : 0);
            if (both > threshold * (areas[i] + areas[j] - both))
                dead[j] = 1;
        }
    }
    free(dead);
    free(areas);
    return count;
}
