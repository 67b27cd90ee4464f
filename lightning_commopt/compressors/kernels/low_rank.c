/* Products of float32 matrices with thin factors, in one pass over memory each. low_rank.py says what they do.
 *
 * A matrix is (m, k), row by row; P (m, r) and Q (k, r) are stored column by column, as (r, m) and (r, k). Sums do not
 * depend on the number of threads, which share rows where the product is P, and columns where it is Q. Columns are taken
 * LANES at a time and rows ROWS at a time, and of the factors WIDTH columns at a time, so that what belongs to them stays
 * in registers. Columns of factors are often a power of two apart, where caches have room for a few of them only: what is
 * needed of Q for the same columns of the matrix is packed.
 */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __AVX__
#include <immintrin.h>
#endif

#define ROWS 4
#define WIDTH 4
#define LANES 8
#define ALIGNMENT 64 /* bytes of a cache line */
#define LINE 16      /* elements of it */
#define MIN_SHARED 65536 /* elements of a matrix that are worth a second thread */

enum { SUBTRACT = 1, ADD = 2, ROW_SUMS = 4, COLUMN_SUMS = 8 }; /* what is done in one go */

#define INLINE static inline __attribute__((always_inline))

typedef float lanes __attribute__((vector_size(4 * LANES)));
typedef int bits __attribute__((vector_size(4 * LANES)));

typedef struct {
    ptrdiff_t m, k, r;
    const float *gradient, *sent_p; /* NULL if nothing is folded */
    float *matrix;
    float *p;      /* written by ROW_SUMS, read by COLUMN_SUMS */
    float *packed; /* see `packed_at` */
} product;

INLINE ptrdiff_t least(ptrdiff_t a, ptrdiff_t b) { return a < b ? a : b; }

INLINE ptrdiff_t padded(ptrdiff_t k) { return (k + LANES - 1) / LANES * LANES; }

INLINE lanes load(const float *from, ptrdiff_t n) {
    lanes values = {0};
    memcpy(&values, from, 4 * n);
    return values;
}

INLINE void store(float *to, lanes values, ptrdiff_t n) { memcpy(to, &values, 4 * n); }

/* Of WIDTH columns of the factors from `first` on, LANES columns from `column` on: (width, LANES) of the Q that was sent,
 * then (width, LANES) of the Q of the product. */
INLINE float *packed_at(const product *x, int first, int width, ptrdiff_t column) {
    return x->packed + 2 * (first * padded(x->k) + width * column);
}

INLINE void visit_lanes(const int width, const int rows, const int does, const product *x, float *packed, ptrdiff_t at,
                        const ptrdiff_t n, float sent_p[ROWS][WIDTH], float p[ROWS][WIDTH], lanes sums[ROWS][WIDTH]) {
    lanes values[ROWS];
    for (int y = 0; y < rows; y++) values[y] = load(x->matrix + at + y * x->k, n);
    if (does & SUBTRACT)
        for (int i = 0; i < width; i++) {
            lanes sent_q = load(packed + i * LANES, LANES);
            for (int y = 0; y < rows; y++) values[y] -= sent_p[y][i] * sent_q;
        }
    for (int y = 0; y < rows; y++) {
        lanes kept = values[y];
        if (does & ADD) {
            lanes gradient = load(x->gradient + at + y * x->k, n);
            bits finite = (gradient - gradient) == 0;
            values[y] += gradient;
            kept = (lanes)((finite & (bits)values[y]) | (~finite & (bits)kept));
        }
        if (does & (SUBTRACT | ADD)) store(x->matrix + at + y * x->k, kept, n);
    }
    for (int i = 0; i < width && does & (ROW_SUMS | COLUMN_SUMS); i++) {
        float *at_q = packed + (width + i) * LANES;
        lanes q = load(at_q, LANES);
        for (int y = 0; y < rows; y++)
            if (does & ROW_SUMS)
                sums[y][i] += values[y] * q;
            else
                q += p[y][i] * values[y];
        if (does & COLUMN_SUMS) store(at_q, q, LANES);
    }
}

INLINE float total(lanes values) {
    float sums[LANES];
    memcpy(sums, &values, sizeof sums);
    for (int n = LANES / 2; n; n /= 2)
        for (int i = 0; i < n; i++) sums[i] += sums[i + n];
    return sums[0];
}

INLINE void visit(const int width, const int rows, const int does, const product *x, int first, ptrdiff_t row,
                  ptrdiff_t begin, ptrdiff_t end, const int is_whole) {
    float sent_p[ROWS][WIDTH] = {{0}}, p[ROWS][WIDTH] = {{0}};
    lanes sums[ROWS][WIDTH] = {{{0}}};
    for (int y = 0; y < rows; y++)
        for (int i = 0; i < width; i++) {
            ptrdiff_t at = (first + i) * x->m + row + y;
            if (does & SUBTRACT) sent_p[y][i] = x->sent_p[at];
            if (does & COLUMN_SUMS) p[y][i] = x->p[at];
        }
    for (ptrdiff_t column = begin; column < end; column += LANES)
        visit_lanes(width, rows, does, x, packed_at(x, first, width, column), row * x->k + column,
                    is_whole ? LANES : least(LANES, end - column), sent_p, p, sums);
    if (does & ROW_SUMS)
        for (int y = 0; y < rows; y++)
            for (int i = 0; i < width; i++) x->p[(first + i) * x->m + row + y] += total(sums[y][i]);
}

/* What is left over where ROWS, or LANES, do not divide the sides of the matrix. */
static __attribute__((noinline)) void visit_rest(int width, int rows, int does, const product *x, int first,
                                                 ptrdiff_t row, ptrdiff_t begin, ptrdiff_t end) {
    visit(width, rows, does, x, first, row, begin, end, 0);
}

INLINE void visit_factors(int rows, const int does, const product *x, int first, ptrdiff_t row, ptrdiff_t begin,
                          ptrdiff_t end) {
    int width = (int)least(WIDTH, x->r - first);
    ptrdiff_t whole = rows == ROWS ? begin + (end - begin) / LANES * LANES : begin;
    if (begin < whole) switch (width) {
        case 1: visit(1, ROWS, does, x, first, row, begin, whole, 1); break;
        case 2: visit(2, ROWS, does, x, first, row, begin, whole, 1); break;
        case 3: visit(3, ROWS, does, x, first, row, begin, whole, 1); break;
        default: visit(WIDTH, ROWS, does, x, first, row, begin, whole, 1);
    }
    if (whole < end) visit_rest(width, rows, does, x, first, row, whole, end);
}

INLINE void visit_part(const int does, const product *x, ptrdiff_t first_row, ptrdiff_t last_row, ptrdiff_t begin,
                       ptrdiff_t end) {
    for (ptrdiff_t row = first_row; row < last_row; row += ROWS) {
        int rows = (int)least(ROWS, last_row - row);
        for (int first = WIDTH; first < x->r && does & SUBTRACT; first += WIDTH)
            visit_factors(rows, SUBTRACT, x, first, row, begin, end);
        visit_factors(rows, does, x, 0, row, begin, end);
        for (int first = WIDTH; first < x->r && does & (ROW_SUMS | COLUMN_SUMS); first += WIDTH)
            visit_factors(rows, does & (ROW_SUMS | COLUMN_SUMS), x, first, row, begin, end);
    }
}

/* Copies `q`, (r, k) in memory, into half 0 or 1 of what is packed, or out of it. Zeros where there is none, and behind the end. */
static void pack(const product *x, int half, const float *q, float *out) {
    for (int i = 0; i < x->r; i++) {
        int first = i / WIDTH * WIDTH, width = (int)least(WIDTH, x->r - first);
        for (ptrdiff_t column = 0; column < x->k; column += LANES) {
            float *packed = packed_at(x, first, width, column) + (half * width + i - first) * LANES;
            ptrdiff_t n = least(LANES, x->k - column);
            if (out)
                store(out + i * x->k + column, load(packed, LANES), n);
            else
                store(packed, q ? load(q + i * x->k + column, n) : (lanes){0}, LANES);
        }
    }
}

static int start(product *x, const float *sent_q, const float *q) {
    size_t size = sizeof(float) * 2 * x->r * padded(x->k);
    x->packed = aligned_alloc(ALIGNMENT, (size + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT);
    if (!x->packed) return -1;
    pack(x, 0, sent_q, NULL);
    pack(x, 1, q, NULL);
    return 0;
}

INLINE void by_columns(const int does, ptrdiff_t threads, const product *x) {
    ptrdiff_t share = padded((x->k + threads - 1) / threads);
#pragma omp parallel for num_threads((int)threads) if (threads > 1 && x->m * x->k >= MIN_SHARED)
    for (ptrdiff_t begin = 0; begin < x->k; begin += share)
        visit_part(does, x, 0, x->m, begin, least(x->k, begin + share));
}

/* Each returns 0, or -1 if there is no memory. */

int fold_rows(ptrdiff_t threads, ptrdiff_t m, ptrdiff_t k, ptrdiff_t r, const float *gradient, float *residual, const float *sent_p,
              const float *sent_q, const float *q, float *p) {
    product x = {m, k, r, gradient, sent_p, residual, p, NULL};
    if (start(&x, sent_q, q)) return -1;
    memset(p, 0, sizeof(float) * r * m);
    ptrdiff_t share = ((m + threads - 1) / threads + ROWS - 1) / ROWS * ROWS;
#pragma omp parallel for num_threads((int)threads) if (threads > 1 && m * k >= MIN_SHARED)
    for (ptrdiff_t row = 0; row < m; row += share)
        visit_part(SUBTRACT | ADD | ROW_SUMS, &x, row, least(m, row + share), 0, k);
    free(x.packed);
    return 0;
}

int fold_columns(ptrdiff_t threads, ptrdiff_t m, ptrdiff_t k, ptrdiff_t r, const float *gradient, float *residual, const float *sent_p,
                 const float *sent_q, const float *p, float *q) {
    product x = {m, k, r, gradient, sent_p, residual, (float *)p, NULL};
    if (start(&x, sent_q, NULL)) return -1;
    by_columns(SUBTRACT | ADD | COLUMN_SUMS, threads, &x);
    pack(&x, 1, NULL, q);
    free(x.packed);
    return 0;
}

int multiply_columns(ptrdiff_t threads, ptrdiff_t m, ptrdiff_t k, ptrdiff_t r, const float *matrix, const float *p, float *q) {
    product x = {m, k, r, NULL, NULL, (float *)matrix, (float *)p, NULL};
    if (start(&x, NULL, NULL)) return -1;
    by_columns(COLUMN_SUMS, threads, &x);
    pack(&x, 1, NULL, q);
    free(x.packed);
    return 0;
}

/* In place, with the bits that `fold_rows` and `fold_columns` have before they add the gradient. */
int subtract_product(ptrdiff_t threads, ptrdiff_t m, ptrdiff_t k, ptrdiff_t r, float *matrix, const float *p, const float *q) {
    product x = {m, k, r, NULL, p, matrix, NULL, NULL};
    if (start(&x, q, NULL)) return -1;
    by_columns(SUBTRACT, threads, &x);
    free(x.packed);
    return 0;
}

/* Writes past the caches, which have no room for what is not read again. `to` is aligned to a store. */
INLINE void store_past(float *to, lanes values) {
#ifdef __AVX__
    __m256 bits;
    memcpy(&bits, &values, sizeof bits);
    _mm256_stream_ps(to, bits);
#else
    store(to, values, LANES);
#endif
}

/* Another thread sees what was written past the caches. */
INLINE void fence(void) {
#ifdef __AVX__
    _mm_sfence();
#endif
}

/* Of P Q^T. Every product and every sum is rounded by itself, so that all processors give the same bits. */
#ifdef __clang__
#define UNFUSED
#pragma clang fp contract(off)
#else
#define UNFUSED __attribute__((optimize("fp-contract=off")))
#endif
UNFUSED static inline lanes product_lanes(ptrdiff_t m, ptrdiff_t k, ptrdiff_t r, const float *p, const float *q,
                                          const ptrdiff_t n) {
    lanes sum = p[0] * load(q, n);
    for (ptrdiff_t i = 1; i < r; i++) sum += p[i * m] * load(q + i * k, n);
    return sum;
}

UNFUSED static void write_kept(ptrdiff_t m, ptrdiff_t k, ptrdiff_t r, const float *p, const float *q, float *out, ptrdiff_t n) {
    for (ptrdiff_t column = 0; column < n; column += LANES) {
        ptrdiff_t width = least(LANES, n - column);
        store(out + column, product_lanes(m, k, r, p, q + column, width), width);
    }
}

/* Only whole cache lines are written past the caches: a part of one would be merged in memory. */
UNFUSED static void write_row(ptrdiff_t m, ptrdiff_t k, ptrdiff_t r, const float *p, const float *q, float *out) {
    ptrdiff_t first = least(k, (ptrdiff_t)(-(uintptr_t)out / sizeof(float) % LINE));
    ptrdiff_t last = first + (k - first) / LINE * LINE;
    write_kept(m, k, r, p, q, out, first);
    for (ptrdiff_t column = first; column < last; column += LANES)
        store_past(out + column, product_lanes(m, k, r, p, q + column, LANES));
    write_kept(m, k, r, p, q + last, out + last, k - last);
}

void write_product(ptrdiff_t threads, ptrdiff_t m, ptrdiff_t k, ptrdiff_t r, const float *p, const float *q, float *out) {
#pragma omp parallel num_threads((int)threads) if (threads > 1 && m * k >= MIN_SHARED)
    {
#pragma omp for nowait
        for (ptrdiff_t row = 0; row < m; row++) write_row(m, k, r, p + row, q, out + row * k);
        fence();
    }
}
