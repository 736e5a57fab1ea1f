// Gradients of `attend.cpp`: tile by tile once more, the weights made again from the inputs.
#include "attend.cpp"
#include "back.h"

struct AttendBack {
  Attend of;           // its output is not read
  Rows out;            // the gradient that comes: (B, Hq, Nq, Dv), of the dtype of the inputs
  float *query;        // (B, Hq, Nq, D)
  float *key, *value;  // (B, Hkv, Nk, D), (B, Hkv, Nk, Dv), through the band: zeros, to be added to
  float *shared_key, *shared_value;  // (B Hkv, shared, D), (B Hkv, shared, Dv filled up): the same
};

// The first-order term adds sum_r u_r s right_r to the output, u_r = scale q . left_r, s = sum_c P_c factor_c. So
// phi = sum_r u_r (g . right_r) joins the gradient of every stand-in's weight, times its factor, and q . left_r has the
// gradient s (g . right_r).
template <class T>
class AttentionBack : Attention<Lanes<T>> {
 public:
  static constexpr int TILES = 16;  // whose gradients are added up before they are handed on

  explicit AttentionBack(const AttendBack &all)
      : Attention<Lanes<T>>(all.of), all(all), dim(p.dim), value_dim(p.value_dim), columns(p.entries + p.means),
        shared(columns + p.rank, dim, value_dim),
        band(std::min<int64_t>(p.keys, std::max<int64_t>(0, TILES * TILE + p.left + p.right)), dim, value_dim),
        asked(dim, value_dim), slope_shared((columns + p.rank) * TILE), slope_near(near.size()), raw(p.rank * TILE) {}

  void attend(int64_t b, int64_t h, int64_t piece, int64_t pieces, Turns &turns) {
    const int64_t shared_head = h / p.groups, head = b * (p.heads / p.groups) + shared_head;
    const int64_t begin = piece * TILES * TILE, end = std::min(p.queries, begin + TILES * TILE);
    const int64_t low = std::clamp<int64_t>(begin + p.offset - p.left, 0, p.keys);
    const int64_t high = std::clamp<int64_t>(end + p.offset + p.right, low, p.keys);
    take(b, shared_head, head, low, high);
    for (int64_t first = begin; first < end; first += TILE)
      attend_tile(b, h, head, first, std::min<int64_t>(TILE, end - first), low);
    turns.wait(head, h % p.groups * pieces + piece);
    hand_on(head, low, high);
    turns.pass_on(head);
  }

 private:
  typedef Attention<Lanes<T>> Base;
  using Base::p, Base::score, Base::near, Base::slope;
  const AttendBack &all;
  const int dim, value_dim, columns;
  Pairs shared, band;
  Asked<T> asked;
  Numbers<float> slope_shared, slope_near, raw;

  void take(int64_t b, int64_t h, int64_t head, int64_t low, int64_t high) {
    const int64_t count = columns + p.rank;
    const float *key = p.shared_key + head * count * dim, *value = p.shared_value + head * count * shared.wide;
    copy_rows(key, dim, count, dim, shared.deep, shared.key.data());
    copy_rows(value, shared.wide, count, shared.wide, shared.wide, shared.value.data());
    copy_rows(all.of.key.at<T>(b, h, low), p.key.row, high - low, dim, band.deep, band.key.data());
    copy_rows(all.of.value.at<T>(b, h, low), p.value.row, high - low, value_dim, band.wide, band.value.data());
    shared.clear();
    band.clear();
  }

  void attend_tile(int64_t b, int64_t h, int64_t head, int64_t first, int rows, int64_t low) {
    const int64_t position = first + p.offset;
    const int64_t begin = std::clamp<int64_t>(position - p.left, 0, p.keys);
    const int reached = std::clamp<int64_t>(position + rows + p.right, begin, p.keys) - begin;
    const T *query = all.of.query.at<T>(b, h, first), *out = all.out.at<T>(b, h, first);
    asked.set(query, p.query.row, out, all.out.row, rows);
    asked.look(shared, 0, columns + p.rank, score.data());
    asked.look(band, begin - low, reached, near.data());
    Tile tile(p.scale);
    this->look_near(tile, head, position, begin, reached);
    this->look_at_list(tile, head, position);
    this->look_at_means(tile, head);
    tile.settle();
    tile.weigh(near.data(), reached);
    tile.weigh(score.data(), p.entries);
    this->weigh_means(tile, head);
    std::copy_n(&score[columns * TILE], p.rank * TILE, raw.data());
    this->weigh_first_order();
    vec inverse[WIDE], mean[WIDE] = {};
    invert(tile, inverse);
    divide(near.data(), reached, inverse);
    divide(score.data(), columns + p.rank, inverse);

    asked.value(band, begin - low, reached, slope_near.data());
    asked.value(shared, 0, columns + p.rank, slope_shared.data());
    first_order(head, inverse);
    add_products(near.data(), slope_near.data(), reached, mean);
    add_products(score.data(), slope_shared.data(), columns, mean);
    settle_slopes(near.data(), slope_near.data(), reached, mean, p.scale);
    settle_slopes(score.data(), slope_shared.data(), columns, mean, p.scale);
    asked.share_out(near.data(), slope_near.data(), band, begin - low, reached);
    asked.share_out(score.data(), slope_shared.data(), shared, 0, columns + p.rank);
    asked.write(all.query + ((b * p.heads + h) * p.queries + first) * dim);
  }

  void first_order(int64_t head, const vec *inverse) {
    vec phi[WIDE] = {};
    for (int r = 0; r < p.rank; r++)
      for (int w = 0, v = 0; w < WIDE; w++, v += LANES) {
        float *to = &slope_shared[(columns + r) * TILE + v];
        phi[w] += load(&raw[r * TILE + v]) * load(to) * p.scale;
        store(to, load(to) * slope[w] * inverse[w] * p.scale);
      }
    for (int c = 0; p.rank && c < p.means; c++)
      for (int w = 0, v = 0; w < WIDE; w++, v += LANES) {
        float *to = &slope_shared[(p.entries + c) * TILE + v];
        store(to, load(to) + phi[w] * p.factor[head * p.means + c]);
      }
  }

  void hand_on(int64_t head, int64_t low, int64_t high) {
    for (int64_t j = low; j < high; j++) {
      add(all.key + (head * p.keys + j) * dim, &band.to_key[(j - low) * band.deep], 1.0f, dim);
      add(all.value + (head * p.keys + j) * value_dim, &band.to_value[(j - low) * band.wide], 1.0f, value_dim);
    }
    const int64_t count = columns + p.rank;
    for (int64_t c = 0; c < count; c++)
      add(all.shared_key + (head * count + c) * dim, &shared.to_key[c * shared.deep], 1.0f, dim);
    add(all.shared_value + head * count * shared.wide, shared.to_value.data(), 1.0f, count * shared.wide);
  }
};

template <class T>
static void attend_back(const AttendBack &all, int threads) {
  const Attend &p = all.of;
  const int64_t piece = AttentionBack<T>::TILES * TILE, pieces = (p.queries + piece - 1) / piece;
  Turns turns(p.batch * (p.heads / p.groups));
#pragma omp parallel num_threads(threads)
  {
    AttentionBack<T> attention(all);
#pragma omp for schedule(monotonic : dynamic, 1)
    for (int64_t t = 0; t < p.batch * p.heads * pieces; t++)
      attention.attend(t / pieces / p.heads, t / pieces % p.heads, t % pieces, pieces, turns);
  }
}

extern "C" void fewkeys_attend_back(const AttendBack *p, int is_bf16, int threads) {
  is_bf16 ? attend_back<bf16>(*p, threads) : attend_back<float>(*p, threads);
}
