// Softmax over a shared list, a band of near keys and stand-ins: `fewkeys.rest.base.StandIns` has the equations.
#include "tile.h"

struct Attend {
  Rows query, key, value, out;
  // What all queries of a key head share, in rows: the list, the stand-ins, the left factor of the first-order term.
  const float *shared_key, *shared_value;  // (B Hkv, entries + means + rank, D or Dv filled up)
  const int64_t *place;                    // (B Hkv, entries): where the list's keys stand; beyond the last: none
  const float *bias, *total, *factor;      // (B Hkv, means)
  const int64_t *label;                    // (B Hkv, Nk)
  const float *share;                      // (B Hkv, Nk)
  const uint8_t *hidden;                   // (B Hkv, Nk): keys that no band reaches; or null
  int64_t batch, heads, groups, queries, keys, dim, value_dim, entries, means, rank, offset, left, right, causal;
  float scale;
};

constexpr float ROUNDING = 1e-5f;

static int64_t reach_of(const Attend &p) {
  return std::max<int64_t>(0, std::min<int64_t>(p.keys, TILE + p.left + p.right));
}

static int64_t scratch_of(const Attend &p) {
  const int64_t rows = p.entries + 2 * p.means + p.rank + reach_of(p), wide = filled(p.value_dim);
  return TILE * (p.dim + rows + wide) + reach_of(p) * (p.dim + wide);
}

template <class T>
static void attend_tile(const Attend &p, int64_t b, int64_t h, int64_t first, float *scratch) {
  const int64_t shared_head = h / p.groups, head = b * (p.heads / p.groups) + shared_head;
  const int dim = p.dim, wide = filled(p.value_dim), entries = p.entries, means = p.means;
  const int columns = entries + means, shared = columns + p.rank, rows = std::min<int64_t>(TILE, p.queries - first);
  const int64_t position = first + p.offset;  // of the first query among the keys
  const int64_t begin = std::clamp<int64_t>(position - p.left, 0, p.keys);
  const int64_t end = std::clamp<int64_t>(position + rows + p.right, begin, p.keys);
  const int band = end - begin;

  float *query = scratch, *score = query + dim * TILE, *near = score + (int64_t)shared * TILE;
  float *count = near + (int64_t)band * TILE, *mixed = count + means * TILE, *copy = mixed + TILE * wide;
  to_lanes(p.query.at<T>(b, h, first), p.query.row, rows, dim, p.scale, query);
  dots(p.shared_key + head * shared * dim, dim, shared, dim, query, score);
  int64_t key_stride = p.key.row, value_stride = p.value.row;
  const float *key = floats(p.key.at<T>(b, shared_head, begin), key_stride, band, dim, dim, copy);
  const float *value =
      floats(p.value.at<T>(b, shared_head, begin), value_stride, band, p.value_dim, wide, copy + (int64_t)band * dim);
  dots(key, key_stride, band, dim, query, near);

  const ivec lane = count_up();
  const vec none = all(-INFINITY);
  const float *total = p.total + head * means;
  for (int c = 0; c < means; c++)
    for (int v = 0; v < TILE; v += LANES) store(count + c * TILE + v, all(total[c]));
  Tile tile;

  // The band: queries within reach see a key, and no stand-in speaks for it to them.
  for (int j = 0; j < band; j++) {
    const int64_t at = begin + j, index = head * p.keys + at;
    const float share = means ? p.share[index] : 0.0f;
    const int low = std::max<int64_t>(at - p.right - position, 0);
    const int high = std::min<int64_t>(at + p.left - position, TILE);
    tile.show(near + j * TILE, lane, p.hidden && p.hidden[index] ? TILE : low, high);
    if (share == 0.0f) continue;
    float *left = count + p.label[index] * TILE;
    for (int v = 0; v < TILE; v += LANES)
      store(left + v, load(left + v) - within(lane + v, low, high, all(share), all(0.0f)));
  }
  for (int c = 0; c < entries; c++) {
    const int64_t place = p.place[head * entries + c];
    const int low = place >= p.keys ? TILE : p.causal ? std::clamp<int64_t>(place - position, 0, TILE) : 0;
    tile.show(score + c * TILE, lane, low, TILE);
  }
  float *mean_score = score + entries * TILE;
  for (int c = 0; c < means; c++) {
    const float bias = p.bias[head * means + c];
    // A stand-in all of whose keys are kept must vanish exactly, not up to rounding.
    const vec least = all(ROUNDING * total[c]);
    for (int w = 0, v = 0; w < WIDE; w++, v += LANES) {
      const vec x = load(count + c * TILE + v) > least ? load(mean_score + c * TILE + v) + bias : none;
      store(mean_score + c * TILE + v, x);
      tile.top[w] = larger(tile.top[w], x);
    }
  }

  tile.settle();
  tile.weigh(near, band);
  tile.weigh(score, entries);
  vec slope[WIDE] = {};
  for (int c = 0; c < means; c++) {
    const float factor = p.rank ? p.factor[head * means + c] : 0.0f;
    for (int w = 0, v = 0; w < WIDE; w++, v += LANES) {
      const vec x = exponential(load(mean_score + c * TILE + v) - tile.top[w]) * load(count + c * TILE + v);
      store(mean_score + c * TILE + v, x);
      tile.sum[w] += x;
      slope[w] += x * factor;
    }
  }
  // The first-order term is `rank` more columns: q left, times what the stand-ins' factors sum up to.
  for (int r = 0; r < p.rank; r++)
    for (int w = 0, v = 0; w < WIDE; w++, v += LANES) {
      float *x = score + (columns + r) * TILE + v;
      store(x, load(x) * slope[w]);
    }

  memset(mixed, 0, sizeof(float) * TILE * wide);
  for (int i = 0; i < rows; i += SOME) {
    mix<SOME>(p.shared_value + head * shared * wide, wide, shared, wide, score + i, TILE, mixed + i * wide, wide);
    const int low = std::clamp<int64_t>(position + i - p.left - begin, 0, band);
    const int high = std::clamp<int64_t>(position + i + SOME + p.right - begin, low, band);
    mix<SOME>(value + low * value_stride, value_stride, high - low, wide, near + low * TILE + i, TILE,
              mixed + i * wide, wide);
  }
  tile.write(mixed, wide, (T *)p.out.at<T>(b, h, first), p.out.row, rows, p.value_dim);
}

template <class T>
static void attend(const Attend &p, int threads) {
  const int64_t tiles = (p.queries + TILE - 1) / TILE, work = tiles * p.batch * p.heads;
#pragma omp parallel num_threads(threads)
  {
    const std::unique_ptr<float[]> scratch(new float[scratch_of(p)]);
#pragma omp for schedule(dynamic, 4)
    for (int64_t t = 0; t < work; t++)
      attend_tile<T>(p, t / tiles / p.heads, t / tiles % p.heads, t % tiles * TILE, scratch.get());
  }
}

extern "C" void fewkeys_attend(const Attend *p, int is_bf16, int threads) {
  is_bf16 ? attend<bf16>(*p, threads) : attend<float>(*p, threads);
}
