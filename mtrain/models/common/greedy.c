/* Greedy suppression, with the operations of _overlapping in nms.py in its order and in float32, so that the same boxes remain, to the bit.
   Products and sums must stay apart (-ffp-contract=off).

   corners: 4 rows of n values, x1 y1 x2 y2, best score first; areas, classes: n of each; alive: n bytes, all 1.
   kept: receives the places of at most max_kept boxes that remain, in order. Returns their number. */

long mtrain_greedy_suppress(const float *restrict corners, const float *restrict areas, const int *restrict classes, long n,
                            float threshold, long max_kept, unsigned char *restrict alive, long *restrict kept)
{
    const float *restrict x1 = corners, *restrict y1 = corners + n, *restrict x2 = corners + 2 * n, *restrict y2 = corners + 3 * n;
    long count = 0;
    for (long i = 0; i < n && count < max_kept; i++) {
        if (!alive[i])
            continue;
        kept[count++] = i;
        const float left = x1[i], top = y1[i], right = x2[i], bottom = y2[i], area = areas[i];
        const int group = classes[i];
        for (long j = i + 1; j < n; j++) {
            float width = (right < x2[j] ? right : x2[j]) - (left > x1[j] ? left : x1[j]);
            float height = (bottom < y2[j] ? bottom : y2[j]) - (top > y1[j] ? top : y1[j]);
            width = width > 0 ? width : 0;
            height = height > 0 ? height : 0;
            const float shared = width * height;
            const float both = (area + areas[j]) - shared;
            /* A corner that is no number makes the area one, and no comparison with it holds. */
            alive[j] &= !((shared > threshold * both) & (classes[j] == group));
        }
    }
    return count;
}
