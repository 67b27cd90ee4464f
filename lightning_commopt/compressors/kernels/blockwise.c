/* Blocks of float32 as int8 or int4 with one scale each, in one pass over memory. blockwise.py says what they do.
 *
 * A product and the sum that follows it are rounded once where the processor can, as torch does it.
 */
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define MAX_IN_BLOCK 256
#define GROUP 8 /* blocks that are encoded together */
#define DEFAULT_INT4_BLOCK 32 /* whose loops are unrolled */
#define MIN_SHARED 65536 /* elements that are worth a second thread */
#define INFINITE 0x7f800000 /* the bits of the smallest magnitude that is not finite */
#define SCALE_OF_TOP_8 (float)((1 - 0x1p-22) / 127)
#define SCALE_OF_TOP_4 (float)((1 - 0x1p-22) / (8 * (8 + INT4_CURVE)))
#define MIN_SCALE 0x1p-126f
#define ROUNDING_MAGIC 0x1.8p23f
#define INT4_CURVE 4
#define INT4_OFFSET (INT4_CURVE * INT4_CURVE / 4.0f - 0.25f)
#define INLINE static inline __attribute__((always_inline))
#ifdef __AVX512F__ /* elements that are worked on at once; a compiler does no good to longer vectors than the processor has */
#define LANES 16
#elif defined(__AVX2__)
#define LANES 8
#else
#define LANES 4
#endif

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef int8_t Bytes __attribute__((vector_size(LANES)));

INLINE float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

INLINE uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

/* How many elements of the block that begins at `first` there are, of `numel`. */
static ptrdiff_t present(ptrdiff_t first, ptrdiff_t size, ptrdiff_t numel) {
    ptrdiff_t rest = numel - first;
    return rest < 0 ? 0 : rest < size ? rest : size;
}

INLINE float read_scale(int bits, const uint8_t *scales, ptrdiff_t block) {
    if (bits == 8) return ((const float *)scales)[block];
    return float_of((uint32_t)((const uint16_t *)scales)[block] << 16);
}

INLINE void write_scale(int bits, uint8_t *scales, ptrdiff_t block, float scale) {
    if (bits == 8)
        ((float *)scales)[block] = scale;
    else
        ((uint16_t *)scales)[block] = (uint16_t)(bits_of(scale) >> 16);
}

INLINE Floats level_of(Floats code) { return code * ((Floats)((Ints)code & 0x7fffffff) + INT4_CURVE); }

INLINE Floats floats_of(Bytes codes) { return __builtin_convertvector(__builtin_convertvector(codes, Ints), Floats); }

/* What LANES bytes stand for, before the scale: elements of the first and of the second half of a block. */
INLINE void read_lanes_4(const int8_t *codes, Floats levels[2]) {
    Bytes both;
    memcpy(&both, codes, sizeof both);
    levels[0] = level_of(floats_of((both << 4) >> 4));
    levels[1] = level_of(floats_of(both >> 4));
}

/* Magnitudes are in the order of their bits, NaN and infinity last. */
INLINE uint32_t top_bits_8(ptrdiff_t size, const float *values) {
    int32_t top = 0;
    for (ptrdiff_t i = 0; i < size; i++) {
        int32_t magnitude = (int32_t)(bits_of(values[i]) & 0x7fffffff);
        top = magnitude > top ? magnitude : top;
    }
    return (uint32_t)top;
}

/* Writes codes of a block, and what they leave out to `rest` if that is wanted; returns its scale. */
INLINE float encode_block_8(ptrdiff_t size, const float *values, float *rest, int8_t *codes) {
    uint32_t top = top_bits_8(size, values);
    if (top >= INFINITE) {
        memset(codes, 0, size);
        return float_of(top);
    }
    float scale = float_of(top) * SCALE_OF_TOP_8;
    if (scale < MIN_SCALE) scale = MIN_SCALE;
    float inverse = 1 / scale;
    if (top == 0) scale = 0;
    for (ptrdiff_t i = 0; i < size; i++) {
        float rounded = ROUNDING_MAGIC + values[i] * inverse;
        codes[i] = (int8_t)bits_of(rounded);
        if (rest) rest[i] = values[i] - (rounded - ROUNDING_MAGIC) * scale;
    }
    return scale;
}

/* Negative floats are the largest unsigned numbers, and negative signed ones. */
INLINE float scale_of_block_4(ptrdiff_t size, const float *values) {
    int32_t positive = 0;
    uint32_t negative = 0;
    for (ptrdiff_t i = 0; i < size; i++) {
        uint32_t bits = bits_of(values[i]);
        positive = (int32_t)bits > positive ? (int32_t)bits : positive;
        negative = bits > negative ? bits : negative;
    }
    negative = negative & 0x80000000 ? negative & 0x7fffffff : 0;
    uint32_t top = (uint32_t)positive > negative ? (uint32_t)positive : negative;
    if (top >= INFINITE) return float_of(top > INFINITE ? 0x7fc00000 : INFINITE);
    if (top == 0) return 0;
    float scale = float_of(top) * SCALE_OF_TOP_4;
    if (scale < MIN_SCALE) scale = MIN_SCALE;
    uint32_t sign = (uint32_t)((uint32_t)positive >= negative) << 31; /* no branch: half of them are positive */
    return float_of((bits_of(scale) & 0xffff0000) | sign);
}

/* Returns the codes of some elements of a block with this scale, and writes what they leave out to `rest` if that is wanted. */
INLINE Ints encode_lanes_4(float scale, float inverse, const float *values, float *rest) {
    float roots[LANES];
    Floats value, code;
    memcpy(&value, values, sizeof value);
    code = INT4_OFFSET + (Floats)((Ints)value & 0x7fffffff) * inverse;
    memcpy(roots, &code, sizeof code);
    for (int i = 0; i < LANES; i++) roots[i] = sqrtf(roots[i]);
    memcpy(&code, roots, sizeof code);
    Ints sign = ((Ints)value ^ (int32_t)bits_of(scale)) & INT32_MIN;
    code = (Floats)(((Ints)(code - INT4_CURVE / 2.0f) & INT32_MAX) | sign) + ROUNDING_MAGIC;
    int32_t most = (int32_t)bits_of(ROUNDING_MAGIC + 7);
    Ints bits = (Ints)code, is_less = bits < most;
    bits = (bits & is_less) | (most & ~is_less);
    if (rest) {
        value -= level_of((Floats)bits - ROUNDING_MAGIC) * scale;
        memcpy(rest, &value, sizeof value);
    }
    return bits;
}

/* Writes codes of a block with this scale, and what they leave out to `rest` if that is wanted. */
INLINE void encode_block_4(ptrdiff_t size, float scale, const float *values, float *rest, int8_t *codes) {
    float inverse = scale == 0 ? 0x1p126f : 1 / fabsf(scale);
    for (ptrdiff_t i = 0, half = size / 2; i < half; i += LANES) {
        Ints first = encode_lanes_4(scale, inverse, values + i, rest ? rest + i : NULL);
        Ints second = encode_lanes_4(scale, inverse, values + half + i, rest ? rest + half + i : NULL);
        Bytes both = __builtin_convertvector((first & 15) | (second << 4), Bytes);
        memcpy(codes + i, &both, sizeof both);
    }
}

/* Writes codes and scales of `count` blocks, and what they leave out of those that are finite to `rest`, which may be `values`
 * or NULL; all scales come first, as each takes long, and the processor works on several. */
INLINE void encode_blocks(int bits, ptrdiff_t count, ptrdiff_t size, const float *values, float *rest, int8_t *codes,
                          float *scales) {
    for (ptrdiff_t k = 0; k < count; k++)
        if (bits == 8)
            scales[k] = encode_block_8(size, values + k * size, rest ? rest + k * size : NULL, codes + k * size);
        else
            scales[k] = scale_of_block_4(size, values + k * size);
    for (ptrdiff_t k = 0; k < count && bits == 4; k++)
        if (isfinite(scales[k]))
            encode_block_4(size, scales[k], values + k * size, rest ? rest + k * size : NULL, codes + k * (size / 2));
        else
            memset(codes + k * (size / 2), 0, size / 2);
}

INLINE void encode_some(int bits, ptrdiff_t count, ptrdiff_t size, ptrdiff_t block, ptrdiff_t numel, const float *flat,
                        float *residual, int8_t *codes, uint8_t *scales) {
    float values[GROUP * MAX_IN_BLOCK], new_scales[GROUP];
    ptrdiff_t first = block * size, n = present(first, count * size, numel);
    codes += block * (size * bits / 8);
    if (n == count * size && !residual) {
        encode_blocks(bits, count, size, flat + first, NULL, codes, new_scales);
    } else {
        if (n < count * size) memset(values, 0, sizeof(float) * count * size);
        if (n == count * size)
            for (ptrdiff_t i = 0; i < count * size; i++) values[i] = flat[first + i] + residual[first + i];
        else
            for (ptrdiff_t i = 0; i < n; i++) values[i] = residual ? flat[first + i] + residual[first + i] : flat[first + i];
        encode_blocks(bits, count, size, values, values, codes, new_scales);
    }
    for (ptrdiff_t k = 0; k < count; k++) {
        write_scale(bits, scales, block + k, new_scales[k]);
        if (isfinite(new_scales[k]) && residual)
            memcpy(residual + first + k * size, values + k * size, sizeof(float) * present(k * size, size, n));
    }
}

/* One row of a message: `residual` may be NULL; `numel` elements are there, and zeros behind them. */
void encode(ptrdiff_t threads, ptrdiff_t bits, ptrdiff_t numel, ptrdiff_t num_blocks, ptrdiff_t size, const float *flat,
            float *residual, int8_t *codes, uint8_t *scales) {
#pragma omp parallel for num_threads((int)threads) if (threads > 1 && num_blocks * size >= MIN_SHARED)
    for (ptrdiff_t block = 0; block < num_blocks; block += GROUP) {
        ptrdiff_t count = num_blocks - block < GROUP ? num_blocks - block : GROUP;
        if (bits == 8)
            for (ptrdiff_t k = 0; k < count; k++) encode_some(8, 1, size, block + k, numel, flat, residual, codes, scales);
        else if (size == DEFAULT_INT4_BLOCK && count == GROUP)
            encode_some(4, GROUP, DEFAULT_INT4_BLOCK, block, numel, flat, residual, codes, scales);
        else
            encode_some(4, count, size, block, numel, flat, residual, codes, scales);
    }
}

/* Writes the mean of a block over the ranks. */
INLINE void average_block(int bits, ptrdiff_t size, ptrdiff_t block, ptrdiff_t num_blocks, ptrdiff_t world_size,
                          ptrdiff_t stride, const int8_t *shares, float *values) {
    ptrdiff_t code_bytes = size * bits / 8;
    const int8_t *codes = shares + block * code_bytes;
    const uint8_t *scales = (const uint8_t *)shares + num_blocks * code_bytes;
    if (bits == 8) {
        for (ptrdiff_t rank = 0; rank < world_size; rank++, codes += stride, scales += stride) {
            float weight = read_scale(8, scales, block) / (float)world_size;
            for (ptrdiff_t i = 0; i < size; i++) values[i] = rank ? values[i] + codes[i] * weight : codes[i] * weight;
        }
        return;
    }
    for (ptrdiff_t i = 0; i < size / 2; i += LANES) {
        Floats first = {0}, second = {0}, levels[2];
        for (ptrdiff_t rank = 0; rank < world_size; rank++) {
            float weight = read_scale(4, scales + rank * stride, block) / (float)world_size;
            read_lanes_4(codes + rank * stride + i, levels);
            first += levels[0] * weight;
            second += levels[1] * weight;
        }
        memcpy(values + i, &first, sizeof first);
        memcpy(values + size / 2 + i, &second, sizeof second);
    }
}

INLINE void reduce_some(int bits, ptrdiff_t count, ptrdiff_t size, ptrdiff_t block, ptrdiff_t num_blocks, ptrdiff_t world_size,
                        ptrdiff_t stride, ptrdiff_t numel, const int8_t *shares, float *residual, int8_t *codes,
                        uint8_t *scales) {
    float values[GROUP * MAX_IN_BLOCK], new_scales[GROUP];
    for (ptrdiff_t k = 0; k < count; k++)
        average_block(bits, size, block + k, num_blocks, world_size, stride, shares, values + k * size);
    if (residual)
        encode_blocks(bits, count, size, values, values, codes + block * (size * bits / 8), new_scales);
    else
        encode_blocks(bits, count, size, values, NULL, codes + block * (size * bits / 8), new_scales);
    for (ptrdiff_t k = 0; k < count; k++) {
        write_scale(bits, scales, block + k, new_scales[k]);
        if (!isfinite(new_scales[k]) || !residual) continue;
        ptrdiff_t first = (block + k) * size, n = present(first, size, numel);
        for (ptrdiff_t i = 0; i < n; i++) residual[first + i] += (float)world_size * values[k * size + i];
    }
}

/* The shares of one shard are `stride` bytes apart. `residual` may be NULL; `numel` elements of it are there. */
void reduce(ptrdiff_t threads, ptrdiff_t bits, ptrdiff_t world_size, ptrdiff_t stride, ptrdiff_t numel, ptrdiff_t num_blocks,
            ptrdiff_t size, const int8_t *shares, float *residual, int8_t *codes, uint8_t *scales) {
#pragma omp parallel for num_threads((int)threads) if (threads > 1 && num_blocks * size >= MIN_SHARED)
    for (ptrdiff_t block = 0; block < num_blocks; block += GROUP) {
        ptrdiff_t count = num_blocks - block < GROUP ? num_blocks - block : GROUP;
        if (bits == 8)
            for (ptrdiff_t k = 0; k < count; k++)
                reduce_some(8, 1, size, block + k, num_blocks, world_size, stride, numel, shares, residual, codes, scales);
        else if (size == DEFAULT_INT4_BLOCK && count == GROUP)
            reduce_some(4, GROUP, DEFAULT_INT4_BLOCK, block, num_blocks, world_size, stride, numel, shares, residual, codes, scales);
        else
            reduce_some(4, count, size, block, num_blocks, world_size, stride, numel, shares, residual, codes, scales);
    }
}

/* The mean of one shard over the ranks, whose shares are `stride` bytes apart. */
void average(ptrdiff_t threads, ptrdiff_t bits, ptrdiff_t world_size, ptrdiff_t stride, ptrdiff_t num_blocks, ptrdiff_t size,
             const int8_t *shares, float *mean) {
#pragma omp parallel for num_threads((int)threads) if (threads > 1 && num_blocks * size >= MIN_SHARED)
    for (ptrdiff_t block = 0; block < num_blocks; block++) {
        if (bits == 8)
            average_block(8, size, block, num_blocks, world_size, stride, shares, mean + block * size);
        else if (size == DEFAULT_INT4_BLOCK)
            average_block(4, DEFAULT_INT4_BLOCK, block, num_blocks, world_size, stride, shares, mean + block * size);
        else
            average_block(4, size, block, num_blocks, world_size, stride, shares, mean + block * size);
    }
}

INLINE void decode_one(int bits, ptrdiff_t size, ptrdiff_t block, ptrdiff_t numel, const int8_t *codes, const uint8_t *scales,
                       float *flat) {
    float values[MAX_IN_BLOCK], scale = read_scale(bits, scales, block);
    ptrdiff_t first = block * size, n = present(first, size, numel);
    codes += block * (size * bits / 8);
    float *to = n == size ? flat + first : values;
    if (bits == 8)
        for (ptrdiff_t i = 0; i < size; i++) to[i] = codes[i] * scale;
    else
        for (ptrdiff_t i = 0; i < size / 2; i += LANES) {
            Floats levels[2];
            read_lanes_4(codes + i, levels);
            levels[0] *= scale, levels[1] *= scale;
            memcpy(to + i, levels, sizeof levels[0]);
            memcpy(to + size / 2 + i, levels + 1, sizeof levels[1]);
        }
    if (0 < n && n < size) memcpy(flat + first, values, sizeof(float) * n);
}

/* One row of a message, of which `numel` elements are wanted. */
void decode(ptrdiff_t threads, ptrdiff_t bits, ptrdiff_t numel, ptrdiff_t num_blocks, ptrdiff_t size, const int8_t *codes,
            const uint8_t *scales, float *flat) {
#pragma omp parallel for num_threads((int)threads) if (threads > 1 && num_blocks * size >= MIN_SHARED)
    for (ptrdiff_t block = 0; block < num_blocks; block++) {
        if (bits == 8)
            decode_one(8, size, block, numel, codes, scales, flat);
        else if (size == DEFAULT_INT4_BLOCK)
            decode_one(4, DEFAULT_INT4_BLOCK, block, numel, codes, scales, flat);
        else
            decode_one(4, size, block, numel, codes, scales, flat);
    }
}
