/* Blocks of float32 as int8 with one scale each, in one pass over memory. block_int8.py says what they do.
 *
 * A product and the sum that follows it are rounded once where the processor can, as torch does it.
 */
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define MOST_IN_BLOCK 256
#define LEAST_SHARED 65536 /* elements that are worth a second thread */
#define INFINITE 0x7f800000 /* the bits of the smallest magnitude that is not finite */
#define SCALE_OF_TOP (float)((1.0 / 127) * (1 - 0x1p-22))
#define SMALLEST_SCALE 0x1p-126f
#define ROUNDING_MAGIC 0x1.8p23f

/* How many elements of the block that begins at `first` there are, of `numel`. */
static ptrdiff_t present(ptrdiff_t first, ptrdiff_t size, ptrdiff_t numel) {
    ptrdiff_t rest = numel - first;
    return rest < 0 ? 0 : rest < size ? rest : size;
}

/* Writes codes and scale of a block, and what they leave out over it; returns whether it is finite. */
static int encode_block(ptrdiff_t size, float *values, int8_t *codes, float *scale) {
    int32_t top_bits = 0; /* magnitudes are in the order of their bits, NaN and infinity last */
    for (ptrdiff_t i = 0; i < size; i++) {
        int32_t bits;
        memcpy(&bits, values + i, 4);
        bits &= 0x7fffffff;
        top_bits = bits > top_bits ? bits : top_bits;
    }
    float top;
    memcpy(&top, &top_bits, 4);
    if (top_bits >= INFINITE) {
        *scale = top;
        memset(codes, 0, size);
        return 0;
    }
    float its_scale = top * SCALE_OF_TOP;
    if (its_scale < SMALLEST_SCALE) its_scale = SMALLEST_SCALE;
    float inverse = 1 / its_scale;
    *scale = top > 0 ? its_scale : 0;
    for (ptrdiff_t i = 0; i < size; i++) {
        float rounded = ROUNDING_MAGIC + values[i] * inverse;
        int32_t bits;
        memcpy(&bits, &rounded, 4);
        codes[i] = (int8_t)bits;
        values[i] -= (rounded - ROUNDING_MAGIC) * *scale;
    }
    return 1;
}

/* One row of a message: `residual` may be NULL; `numel` elements are there, and zeros behind them. */
void encode(ptrdiff_t threads, ptrdiff_t numel, ptrdiff_t num_blocks, ptrdiff_t size, const float *flat, float *residual,
            int8_t *codes, float *scales) {
#pragma omp parallel for num_threads((int)threads) if (threads > 1 && num_blocks * size >= LEAST_SHARED)
    for (ptrdiff_t block = 0; block < num_blocks; block++) {
        float values[MOST_IN_BLOCK] = {0};
        ptrdiff_t first = block * size, n = present(first, size, numel);
        for (ptrdiff_t i = 0; i < n; i++) values[i] = residual ? flat[first + i] + residual[first + i] : flat[first + i];
        if (encode_block(size, values, codes + first, scales + block) && residual)
            memcpy(residual + first, values, sizeof(float) * n);
    }
}

/* The shares of one shard are `stride` bytes apart. `residual` may be NULL; `numel` elements of it are there. */
void reduce(ptrdiff_t threads, ptrdiff_t world_size, ptrdiff_t stride, ptrdiff_t numel, ptrdiff_t num_blocks, ptrdiff_t size,
            const int8_t *shares, float *residual, int8_t *codes, float *scales) {
#pragma omp parallel for num_threads((int)threads) if (threads > 1 && num_blocks * size >= LEAST_SHARED)
    for (ptrdiff_t block = 0; block < num_blocks; block++) {
        float values[MOST_IN_BLOCK];
        ptrdiff_t first = block * size;
        for (ptrdiff_t rank = 0; rank < world_size; rank++) {
            const int8_t *share = shares + rank * stride;
            float weight;
            memcpy(&weight, share + num_blocks * size + 4 * block, 4);
            weight /= (float)world_size;
            for (ptrdiff_t i = 0; i < size; i++)
                values[i] = rank ? values[i] + share[first + i] * weight : share[first + i] * weight;
        }
        if (encode_block(size, values, codes + first, scales + block) && residual)
            for (ptrdiff_t i = 0, n = present(first, size, numel); i < n; i++)
                residual[first + i] += (float)world_size * values[i];
    }
}

/* One row of a message, of which `numel` elements are wanted. */
void decode(ptrdiff_t threads, ptrdiff_t numel, ptrdiff_t num_blocks, ptrdiff_t size, const int8_t *codes, const float *scales,
            float *flat) {
#pragma omp parallel for num_threads((int)threads) if (threads > 1 && num_blocks * size >= LEAST_SHARED)
    for (ptrdiff_t block = 0; block < num_blocks; block++) {
        ptrdiff_t first = block * size, n = present(first, size, numel);
        for (ptrdiff_t i = 0; i < n; i++) flat[first + i] = codes[first + i] * scales[block];
    }
}
