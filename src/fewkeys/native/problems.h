// The arguments of the kernels: the structs that cross ctypes, and nothing else. Python reads them from here
// (`tensors.struct`), and `build.call` compares the sizes.
#pragma once
#include <cstdint>

#define FEWKEYS_EXPORT extern "C" __attribute__((visibility("default")))

namespace fewkeys {

// (B, H, N, dim) in any layout whose last dimension is dense; strides are counted in elements
struct Rows {
  const void *data;
  int64_t batch, head, row;
  template <class T>
  const T *at(int64_t b, int64_t h, int64_t n) const {
    return (const T *)data + b * batch + h * head + n * row;
  }
};

// Softmax over a shared list, a band of near keys and stand-ins: `fewkeys.rest.base.StandIns` has the equations.
struct Near {
  Rows query, key, value, out;
  const int64_t *place;                    // (B Hkv, entries): where the list's keys stand
  const uint8_t *used;                     // the same: zero for entries of no key
  const float *mean_key, *mean_value;      // (B Hkv, means, D or Dv)
  const float *left_factor, *right_factor; // (B Hkv, D, rank), (B Hkv, rank, Dv)
  const float *bias, *total, *factor;      // (B Hkv, means)
  const float *bounds;                     // (B Hkv, 2, rank): middle and reach of what queries are along the left factor
  const int64_t *label;                    // (B Hkv, Nk)
  const float *share;                      // (B Hkv, Nk); null for cohorts
  const uint8_t *hidden;                   // (B Hkv, Nk): keys that no band reaches; or null
  const float *size;                       // (B Hkv, means): how many keys a cohort's stand-in represents; else null
  // Cohorts: each is a head with a list and stand-ins of its own, `cohorts` of them read one key head with its labels
  // and hidden keys, and this tells a cohort's queries, counted through the `asking` query heads of `asked` queries
  // that read the key head: (B heads, Nq), -1 for none.
  const int64_t *order;  // or null: `cohorts` is 1
  int64_t batch, heads, gqa_ratio, queries, keys, dim, value_dim, entries, means, rank, offset, left, right, causal;
  int64_t cohorts, asking, asked;
  float scale;
};

struct Sums {
  Rows key, value;
  const int64_t *label;  // (B Hkv, Nk)
  const float *share;    // (B Hkv, Nk)
  float *sums;           // (B Hkv, C, D + Dv)
  const float *middle;   // (B Hkv, D); null: not asked
  float *products;       // (B Hkv, D, Dv): the sum of share_j (k_j - middle) v_j^T
  int64_t batch, heads, keys, dim, value_dim, count;
};

// The largest entries: `fewkeys.core.validation.largest_entries`; and the rows of every head side by side.
struct Extents {
  Rows query, key, value;
  void *query_copy, *key_copy, *value_copy;  // dense, (B, H, N, dim), of the same dtype; null: none
  float *largest;                            // (3): of each
  int64_t batch, heads, gqa_ratio, queries, keys, dim, value_dim;
};

// The metric of a head's queries on its keys and values: `fewkeys.sketch.clusters.Frame`.
struct Framed {
  Rows query, key, value;          // (B, Hq, M, D): a sample; keys and values that are not real are zero
  const float *asked, *real;       // (B): how many of the queries of a head, and of its keys, count
  float *mean_query, *second;      // (B Hkv, D), (B Hkv, D, D)
  float *mean, *value_mean, *unit; // (B Hkv, D), (B Hkv, Dv), (B Hkv)
  float *root, *form, *shift;      // (B Hkv, D, D), (B Hkv, D + 1, D), (B Hkv, D + 1)
  int64_t *indefinite;             // zero; one, where a matrix has no such root
  int64_t batch, heads, gqa_ratio, queries, keys, dim, value_dim;
  float scale, ridge;
};

// Centres of clusters from a sample of the keys: Lloyd's steps of `fewkeys.sketch.clusters`.
struct Lloyd {
  Rows key, value;             // (B, Hkv, M, D or Dv)
  const uint8_t *real;         // (B, M); null: all are
  // What the queries see: the rows of L^T, which is upper triangular, and the mean query; and what these give for the
  // mean key.
  const float *form, *shift;   // (B Hkv, D + 1, D), (B Hkv, D + 1)
  const float *middle, *unit;  // (B Hkv, Dv): the mean value; (B Hkv)
  float *importance;           // (B Hkv, C)
  float *centre, *constant;    // (B Hkv, C, D + Dv), (B Hkv, C): of keys and values side by side
  int64_t batch, heads, keys, dim, value_dim, count, steps;
  float tilt, lowest;
};

// The clusters of all keys, around centres from some of them.
struct Clustered {
  Lloyd sample;
  Rows key, value;
  int64_t *label;                         // (B Hkv, Nk): the first cluster of the largest x . centre + constant
  float *distance, *spread, *importance;  // (B Hkv, Nk)
  int64_t keys;
  float near;  // of a squared distance from the mean: the least from a centre
};

// Sets of rows in equal parts: `fewkeys.sketch.cohorts.split`.
struct Halves {
  const float *rows;    // (sets, rows_each, dim)
  Rows key;             // float, (B, Hkv, keys, dim), sets = B Hkv: their products around their mean are the metric
  const uint8_t *real;  // (B, keys): which of them count; null: all
  int64_t *place;       // (sets, rows_each padded to a multiple of count): -1 for none
  float *mean;          // (sets, count, dim)
  float *within;        // (sets, dim, dim)
  int64_t sets, heads, rows_each, keys, dim, count, step, sample, power, refine;
  float scale;          // of the rows, in what describes the parts
};

// The best keys of every cohort: `fewkeys.select.outliers`.
struct Best {
  Rows key;
  const float *mean, *within;  // (B Hkv, H, D), (B Hkv, D, D)
  const float *middle;         // (B Hkv, D): the mean key
  const float *distance;       // (B Hkv, Nk): squared, of a key from its centre
  const uint8_t *real;         // (B, Nk); null: all are
  float *half_variance;        // (B Hkv, Nk): k^T W k / 2
  int64_t *index;              // (B Hkv, H, S)
  uint8_t *used;               // (B Hkv, H, S)
  int64_t batch, heads, keys, dim, cohorts, count;
  float near, power;           // the least distance, of the largest; the power of distances
};

// Sums over clusters as every cohort sees them: `fewkeys.sketch.tilted.Tilted`.
struct Tilts {
  Rows key, value;
  const uint8_t *real;   // (B, Nk); null: all are
  const int64_t *label;  // (B Hkv, Nk)
  const float *half_variance;      // (B Hkv, Nk): k^T W k / 2
  const float *middle;   // (B Hkv, D): the mean key
  const float *mean;     // (B Hkv, H, D)
  const int64_t *filled;  // (B Hkv): how many cohorts have queries, the first ones; the others' sums are zero
  const int64_t *index;  // (B Hkv, H, S): keys that a cohort keeps
  const uint8_t *used;   // (B Hkv, H, S)
  float *level;          // (B Hkv, H, C): g_hc
  float *mass, *energy;  // (B Hkv, H, C)
  float *size;           // (B Hkv, H, C): how many real keys of a cluster the cohort does not keep
  float *key_sum;        // (B Hkv, H, C, D): of centred keys
  float *value_sum;      // (B Hkv, H, C, Dv)
  float *together;       // (B Hkv, D, Dv): over all keys and cohorts, of e (k - middle) v^T; null: not asked
  int64_t batch, heads, keys, dim, value_dim, cohorts, count, kept;
  float tilt, largest;
};

struct TiltsBack {
  Tilts of;                                     // its level is read, its sums are not
  const float *key_sum, *value_sum, *together;  // that come, as those of `of`
  float *key, *value;  // (B, Hkv, Nk, D), (B, Hkv, Nk, Dv): zeros, where the gradients of real keys are written
};

// The stand-ins of cohorts, from these sums, which are lost: `fewkeys.rest.cohort_means`.
struct CohortStandIns {
  const float *mass, *energy, *level;         // as `Tilts` has them
  const float *together;                      // (B Hkv, D, Dv): products of keys and values, by their weight
  const float *mean, *within;                 // (B Hkv, H, D), (B Hkv, D, D)
  const float *middle, *unit;                 // (B Hkv, D), (B Hkv)
  float *key, *value;                         // (B Hkv, H, C, D), (B Hkv, H, C, Dv): sums become means where they lie
  float *bias, *factor;                       // (B Hkv, H, C), the same
  float *left, *right, *bounds;               // (B Hkv, H, D, r), (B Hkv, H, r, Dv), (B Hkv, H, 2, r)
  int64_t heads, cohorts, count, dim, value_dim, rank, steps;
  float tilt, largest_tilt, largest_spread, reach, least;
};

// The codes of keys: `fewkeys.sketch.codes.encode`.
struct Coding {
  Rows key;             // (B, Hkv, N, D)
  const float *sign;    // (wide,)
  const float *middle;  // (B Hkv, D)
  const float *spread;  // (B Hkv,)
  uint8_t *packed;      // (B Hkv, blocks, wide / 2, 16)
  int16_t *sigma;       // (B Hkv, 32 blocks)
  int64_t batch, heads, keys, dim, wide, blocks;
};

// The best keys of every query by their codes: `fewkeys.sketch.codes.best`.
struct Scan {
  const uint8_t *packed;  // (B Hkv, room, wide / 2, 16): blocks of 32 keys
  const int16_t *sigma;   // (B Hkv, 32 room)
  Rows query;             // (B, Hq, Nq, D)
  const float *sign;      // (wide,): of the scale, too
  const int64_t *seen;    // (Nq,): among how many keys each query chooses, ascending
  const uint8_t *real;    // (B, Nk); null: all are
  int32_t *index;         // (B, Hq, Nq, count): ascending, -1 for none
  int64_t batch, heads, gqa_ratio, queries, keys, room, dim, wide, count;
};

// Softmax over each query's own block, the keys that it chooses, and means: `fewkeys.select.key_scan`.
struct ScanAttend {
  Scan of;  // its `index` is not written
  Rows key, value, out;
  Rows scales;           // (B, Hkv, Nk, 2), float: of keys and values, which are int8 then; or null
  Rows total;            // (B, Hkv, blocks + 1, D + Dv), float64: sums of the keys and values before each block
  const double *size;    // (B, blocks + 1): of real keys as many; null: all are
  const int64_t *edges;  // (steps, means + 1): where ranges begin, and the last one ends
  int64_t steps, means, blocks, value_dim, offset, causal;
  float scale;
};

}  // namespace fewkeys
