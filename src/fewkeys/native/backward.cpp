// Gradients of `blocks.cpp`: every block once more, its weights made again from the inputs.
#include <atomic>
#include <thread>

#include "blocks.cpp"

struct Gradients {
  Blocks of;     // its output is not read
  Rows out;      // the gradient that comes: (B, Hq, Nq, Dv), of the dtype of the inputs
  float *query;  // (B, Hq, Nq, D)
  float *key, *value;  // (B, Hkv, Nk, D), (B, Hkv, Nk, Dv): zeros, to be added to
  float *means;        // (B, Hkv, blocks, M, D + Dv): keys and values side by side; null without means
};

// With weights P, values v and the gradient g of the output: the weights' gradient is G = g v^T, that of the scores
// S = P (G - sum_c P_c G_c), and queries, keys and values get S k, S^T q and P^T g.
template <class T>
class BlockGradients {
 public:
  explicit BlockGradients(const Gradients &all)
      : all(all), p(all.of), dim(p.dim), value_dim(p.value_dim), deep(filled(p.dim)), wide(filled(p.value_dim)),
        most((p.entries + p.means + TILE - 1) / TILE * TILE), key(most * deep), value(most * wide),
        to_key(most * deep), to_value(most * wide), weight(most * TILE), slope(most * TILE), query(TILE * deep),
        out(TILE * wide), query_lanes(dim * TILE), out_lanes(value_dim * TILE), to_query(TILE * deep),
        turned(TILE * TILE), place(p.entries) {}

  // `turn`: the next block of the head whose gradients may be added; their order decides the rounding.
  void attend(int64_t head, int64_t block, std::atomic<int64_t> &turn) {
    const int64_t shared_heads = p.heads / p.groups, b = head / shared_heads, h = head % shared_heads;
    const int64_t begin = (p.offset / p.size + block) * p.size - p.offset, end = std::min(p.queries, begin + p.size);
    take(b, h, head, block);
    std::fill(to_key.begin(), to_key.end(), 0.0f);
    std::fill(to_value.begin(), to_value.end(), 0.0f);
    for (int64_t g = h * p.groups; g < (h + 1) * p.groups; g++)
      for (int64_t first = std::max<int64_t>(0, begin); first < end; first += TILE)
        attend_tile(b, g, first, std::min<int64_t>(TILE, end - first));
    for (int64_t c = 0; c < p.means; c++) {
      float *to = all.means + ((head * p.blocks + block) * p.means + c) * (dim + value_dim);
      std::copy_n(&to_key[(listed + c) * deep], dim, to);
      std::copy_n(&to_value[(listed + c) * wide], value_dim, to + dim);
    }
    while (turn.load(std::memory_order_acquire) != block) std::this_thread::yield();
    for (int e = 0; e < listed; e++) {
      add(all.key + (head * p.keys + place[e]) * dim, &to_key[e * deep], 1.0f, dim);
      add(all.value + (head * p.keys + place[e]) * value_dim, &to_value[e * wide], 1.0f, value_dim);
    }
    turn.store(block + 1, std::memory_order_release);
  }

 private:
  const Gradients &all;
  const Blocks &p;
  const int dim, value_dim, deep, wide, most;
  Numbers<float> key, value, to_key, to_value;  // list and means, filled up
  Numbers<float> weight, slope;                 // (columns, TILE): P, and G that becomes S
  Numbers<float> query, out, query_lanes, out_lanes, to_query, turned;
  const float *bias = nullptr;
  int listed = 0, columns = 0;
  std::vector<int64_t> place;

  void take(int64_t b, int64_t h, int64_t head, int64_t block) {
    const int64_t at = head * p.blocks + block;
    listed = 0;
    for (int64_t e = 0; e < p.entries; e++)
      if (p.place[at * p.entries + e] < p.keys) place[listed++] = p.place[at * p.entries + e];
    columns = listed + p.means;
    bias = p.bias + at * p.means;
    for (int e = 0; e < listed; e++) {
      copy_rows(p.key.at<T>(b, h, place[e]), 0, 1, dim, deep, &key[e * deep]);
      copy_rows(p.value.at<T>(b, h, place[e]), 0, 1, value_dim, wide, &value[e * wide]);
    }
    copy_rows(p.mean_key.at<float>(b, h, block * p.means), p.mean_key.row, p.means, dim, deep, &key[listed * deep]);
    copy_rows(p.mean_value.at<float>(b, h, block * p.means), p.mean_value.row, p.means, value_dim, wide,
              &value[listed * wide]);
  }

  void weigh(int64_t position) {
    const ivec lane = count_up();
    dots(key.data(), deep, columns, dim, query_lanes.data(), weight.data());
    Tile tile(p.scale);
    for (int c = 0; c < listed; c++)
      tile.show(&weight[c * TILE], lane, p.causal ? std::clamp<int64_t>(place[c] - position, 0, TILE) : 0, TILE);
    for (int c = listed; c < columns; c++)
      for (int w = 0, v = 0; w < WIDE; w++, v += LANES) {
        float *to = &weight[c * TILE + v];
        const vec x = load(to) * p.scale + bias[c - listed];
        store(to, x);
        tile.top[w] = larger(tile.top[w], x);
      }
    tile.settle();
    tile.weigh(weight.data(), columns);
    for (int w = 0, v = 0; w < WIDE; w++, v += LANES) {
      const vec inverse = tile.sum[w] == 0.0f ? vec{} : 1.0f / tile.sum[w];
      for (int c = 0; c < columns; c++) store(&weight[c * TILE + v], load(&weight[c * TILE + v]) * inverse);
    }
  }

  void attend_tile(int64_t b, int64_t h, int64_t first, int rows) {
    copy_rows(p.query.at<T>(b, h, first), p.query.row, rows, dim, deep, query.data());
    copy_rows(all.out.at<T>(b, h, first), all.out.row, rows, value_dim, wide, out.data());
    to_lanes(query.data(), deep, rows, dim, 1.0f, query_lanes.data());
    to_lanes(out.data(), wide, rows, value_dim, 1.0f, out_lanes.data());
    weigh(first + p.offset);
    dots(value.data(), wide, columns, value_dim, out_lanes.data(), slope.data());
    for (int v = 0; v < TILE; v += LANES) {
      vec mean = {};
      for (int c = 0; c < columns; c++) mean += load(&weight[c * TILE + v]) * load(&slope[c * TILE + v]);
      for (int c = 0; c < columns; c++) {
        float *to = &slope[c * TILE + v];
        store(to, load(&weight[c * TILE + v]) * (load(to) - mean) * p.scale);
      }
    }
    std::fill(to_query.begin(), to_query.end(), 0.0f);
    for (int i = 0; i < rows; i += SOME)
      mix<SOME>(key.data(), deep, columns, deep, &slope[i], TILE, &to_query[i * deep], deep);
    for (int i = 0; i < rows; i++)
      std::copy_n(&to_query[i * deep], dim, all.query + ((b * p.heads + h) * p.queries + first + i) * dim);
    gather(slope, query, rows, deep, to_key);
    gather(weight, out, rows, wide, to_value);
  }

  // Adds to every column the rows of the tile under its shares (columns, TILE).
  void gather(const Numbers<float> &share, const Numbers<float> &from, int rows, int width, Numbers<float> &into) {
    for (int begin = 0; begin < columns; begin += TILE) {
      const int end = std::min(begin + TILE, columns);
      turn([&](int c) { return &share[(begin + c) * TILE]; }, end - begin, TILE, 1.0f, turned.data());
      for (int c = begin; c < end; c += SOME)
        mix<SOME>(from.data(), width, rows, width, &turned[c - begin], TILE, &into[c * width], width);
    }
  }
};

template <class T>
static void attend_back(const Gradients &all, int threads) {
  const Blocks &p = all.of;
  const int64_t heads = p.batch * (p.heads / p.groups);
  std::vector<std::atomic<int64_t>> turns(heads);
  for (auto &turn : turns) turn = 0;
#pragma omp parallel num_threads(threads)
  {
    BlockGradients<T> block(all);
#pragma omp for schedule(monotonic : dynamic, 1)
    for (int64_t t = 0; t < heads * p.blocks; t++) block.attend(t / p.blocks, t % p.blocks, turns[t / p.blocks]);
  }
}

extern "C" void fewkeys_attend_back(const Gradients *p, int is_bf16, int threads) {
  is_bf16 ? attend_back<bf16>(*p, threads) : attend_back<float>(*p, threads);
}
