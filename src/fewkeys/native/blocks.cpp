// Softmax over a list of keys and means of the past for every block of queries: `fewkeys.rest.base.BlockStandIns`.
#include "tile.h"

struct Blocks {
  Rows query, key, value, out;
  Rows mean_key, mean_value;  // float, (B, Hkv, blocks x M, D or Dv)
  const float *bias;          // (B Hkv, blocks, M), -inf for none
  const int64_t *place;       // (B Hkv, blocks, E): the keys of every block; beyond the last: none
  const struct Past *past;    // what makes the means while they are read (`prefill.cpp`); else null
  // Blocks are of positions; the first is that of the first query.
  int64_t batch, heads, groups, queries, keys, dim, value_dim, blocks, size, entries, means, offset, causal;
  float scale;
};

static int64_t scratch_of(const Blocks &p) {
  const int64_t wide = filled(p.value_dim), rows = p.entries + p.means;
  return TILE * (p.dim + rows + wide) + p.entries * p.dim + rows * wide;
}

// Means of one block: rows of keys and values, and the bias of their scores.
struct Means {
  const float *key, *value, *bias;
  int64_t key_stride, value_stride;
};

// The keys of one block, and all queries of the block that read them.
template <class T>
class Block {
 public:
  Block(const Blocks &p, float *scratch)
      : p(p), dim(p.dim), wide(filled(p.value_dim)), query(scratch), score(query + dim * TILE),
        mixed(score + (p.entries + p.means) * TILE), key_copy(mixed + wide * TILE),
        value_copy(key_copy + p.entries * dim), copy(value_copy + p.entries * wide), place(p.entries) {}

  void attend(int64_t head, int64_t block) {
    const int64_t b = head / (p.heads / p.groups), h = head % (p.heads / p.groups), first = block * p.means;
    const float *bias = p.bias + head * p.blocks * p.means + first;
    attend(head, block,
           {p.mean_key.at<float>(b, h, first), p.mean_value.at<float>(b, h, first), bias, p.mean_key.row,
            p.mean_value.row});
  }

  void attend(int64_t head, int64_t block, const Means &of) {
    const int64_t shared_heads = p.heads / p.groups, b = head / shared_heads, h = head % shared_heads;
    const int64_t begin = (p.offset / p.size + block) * p.size - p.offset, at = head * p.blocks + block;
    gather(b, h, p.place + at * p.entries);
    means = of;
    means.value = floats(of.value, means.value_stride, p.means, p.value_dim, wide, copy);
    const int64_t end = std::min(p.queries, begin + p.size);
    for (int64_t g = h * p.groups; g < (h + 1) * p.groups; g++)
      for (int64_t first = std::max<int64_t>(0, begin); first < end; first += TILE)
        attend_tile(b, g, first, std::min<int64_t>(TILE, end - first));
  }

 private:
  const Blocks &p;
  const int dim, wide;
  float *query, *score, *mixed, *key_copy, *value_copy, *copy;
  const float *key = nullptr, *value = nullptr;
  int64_t key_stride = 0, value_stride = 0;
  Means means = {};
  int listed = 0;
  std::vector<int64_t> place;

  // Keys that follow one another are read where they lie, if they can be.
  void gather(int64_t b, int64_t h, const int64_t *index) {
    listed = 0;
    bool in_a_row = true;
    for (int64_t e = 0; e < p.entries; e++) {
      if (index[e] >= p.keys) continue;
      in_a_row &= !listed || index[e] == place[listed - 1] + 1;
      place[listed++] = index[e];
    }
    key = key_copy, value = value_copy, key_stride = dim, value_stride = wide;
    if (in_a_row && listed) {
      key_stride = p.key.row, value_stride = p.value.row;
      key = floats(p.key.at<T>(b, h, place[0]), key_stride, listed, dim, dim, key_copy);
      value = floats(p.value.at<T>(b, h, place[0]), value_stride, listed, p.value_dim, wide, value_copy);
      return;
    }
    for (int e = 0; e < listed; e++) {
      copy_rows(p.key.at<T>(b, h, place[e]), 0, 1, dim, dim, key_copy + e * dim);
      copy_rows(p.value.at<T>(b, h, place[e]), 0, 1, p.value_dim, wide, value_copy + e * wide);
    }
  }

  void attend_tile(int64_t b, int64_t h, int64_t first, int rows) {
    const int64_t position = first + p.offset;
    const ivec lane = count_up();
    int seen = listed;
    if (p.causal)
      while (seen && place[seen - 1] > position + rows - 1) seen--;
    to_lanes(p.query.at<T>(b, h, first), p.query.row, rows, dim, p.scale, query);
    float *mean_score = score + seen * TILE;
    dots(key, key_stride, seen, dim, query, score);
    dots(means.key, means.key_stride, p.means, dim, query, mean_score);
    Tile tile;
    for (int c = 0; c < seen; c++)
      tile.show(score + c * TILE, lane, p.causal ? std::clamp<int64_t>(place[c] - position, 0, TILE) : 0, TILE);
    for (int c = 0; c < p.means; c++)
      for (int w = 0, v = 0; w < WIDE; w++, v += LANES) {
        const vec x = load(mean_score + c * TILE + v) + means.bias[c];
        store(mean_score + c * TILE + v, x);
        tile.top[w] = larger(tile.top[w], x);
      }
    tile.settle();
    tile.weigh(score, seen + p.means);
    memset(mixed, 0, sizeof(float) * TILE * wide);
    for (int i = 0; i < rows; i += SOME) {
      mix<SOME>(value, value_stride, seen, wide, score + i, TILE, mixed + i * wide, wide);
      mix<SOME>(means.value, means.value_stride, p.means, wide, mean_score + i, TILE, mixed + i * wide, wide);
    }
    tile.write(mixed, wide, (T *)p.out.at<T>(b, h, first), p.out.row, rows, p.value_dim);
  }
};

template <class T>
static void attend_blocks(const Blocks &p, int threads) {
  const int64_t work = p.batch * (p.heads / p.groups) * p.blocks;
#pragma omp parallel num_threads(threads)
  {
    const std::unique_ptr<float[]> scratch(new float[scratch_of(p)]);
    Block<T> block(p, scratch.get());
#pragma omp for schedule(dynamic, 1)
    for (int64_t t = 0; t < work; t++) block.attend(t / p.blocks, t % p.blocks);
  }
}

extern "C" void fewkeys_attend_blocks(const Blocks *p, int is_bf16, int threads) {
  is_bf16 ? attend_blocks<bf16>(*p, threads) : attend_blocks<float>(*p, threads);
}
