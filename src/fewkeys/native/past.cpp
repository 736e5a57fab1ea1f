// How the means of the past move on, block by block: `fewkeys.past.scan.Walk`.
#include "merge.h"

struct Past {
  // What is known at the beginning, one after the other for every key head; at the end, what is known then.
  float *rows, *excess, *size;                        // (B Hkv, M, D + Dv), (B Hkv, M), (B Hkv, M)
  float *seen, *seen_key, *seen_value, *seen_square;  // (B Hkv), (B Hkv, D), (B Hkv, Dv), (B Hkv)
  float *asked, *asked_total, *asked_square;          // (B Hkv), (B Hkv, D), (B Hkv, D, D)
  // What is known at the beginning and after every step.
  float *rows_by, *excess_by, *size_by;  // (B Hkv, steps + 1, M, D + Dv), (B Hkv, steps + 1, M), the same
  // Where the stand-ins and the keys of every step go, and their shares there: (B Hkv, steps, M + E); or null.
  int64_t *place;
  float *share;
  // Every step's queries, and the keys that it takes up.
  Rows query;               // (B, Hq, steps x S, D)
  const uint8_t *answered;  // (B, steps x S), ones for queries that count; or null: all do
  Rows key, value;
  const int64_t *index;  // (B Hkv, steps, E)
  const uint8_t *real;   // (B Hkv, steps, E)
  int64_t batch, heads, groups, dim, value_dim, count, steps, queries, leaving, tilted;
  float scale, tilt, lowest;
};

// What one step brings: its keys, and the metric in which stand-ins merge.
struct Batch {
  Metric metric;
  Group fresh;
  int surplus = 0;  // so many have to join somebody

  Batch(const Past &p, const Widths &w) : metric(w), fresh(w, p.leaving) {}
};

// The steps' queries and keys, as far as they do not depend on the stand-ins: batches can be made ahead.
template <class Q, class T>
class Arrivals {
 public:
  Arrivals(const Past &p, int64_t head)
      : p(p), head(head), w(p.dim, p.value_dim), asked_total(w.fill), asked_square((w.dim + SOME) * w.fill),
        seen_total(w.span), questions(p.queries * w.fill) {
    const int dim = w.dim;
    for (int64_t c = head * p.count; c < (head + 1) * p.count; c++) known += p.size[c] != 0.0f;
    asked = p.asked[head], seen = p.seen[head], seen_square = p.seen_square[head];
    std::copy_n(p.asked_total + head * dim, dim, asked_total.begin());
    for (int d = 0; d < dim; d++) std::copy_n(p.asked_square + (head * dim + d) * dim, dim, &asked_square[d * w.fill]);
    std::copy_n(p.seen_key + head * dim, dim, seen_total.begin());
    std::copy_n(p.seen_value + head * w.value_dim, w.value_dim, seen_total.begin() + dim);
  }

  void make(int64_t step, Batch &batch) {
    ask(step);
    take_up(step, batch.fresh);
    batch.surplus = std::max<int>(0, known + batch.fresh.used - p.count);
    known += batch.fresh.used - batch.surplus;
    if (!batch.surplus) return;
    set(batch.metric);
    batch.fresh.measure(batch.metric);
  }

  // What is known at the end.
  void finish() const {
    const int dim = w.dim;
    p.asked[head] = asked, p.seen[head] = seen, p.seen_square[head] = seen_square;
    std::copy_n(asked_total.begin(), dim, p.asked_total + head * dim);
    for (int d = 0; d < dim; d++) std::copy_n(&asked_square[d * w.fill], dim, p.asked_square + (head * dim + d) * dim);
    std::copy_n(seen_total.begin(), dim, p.seen_key + head * dim);
    std::copy_n(seen_total.begin() + dim, w.value_dim, p.seen_value + head * w.value_dim);
  }

 private:
  const Past &p;
  const int64_t head;
  const Widths w;
  int known = 0;  // stand-ins after the steps so far
  Numbers<float> asked_total, asked_square, seen_total, questions;
  float asked, seen, seen_square;

  void ask(int64_t step) {
    const int64_t b = head / p.heads, h = head % p.heads;
    for (int64_t g = h * p.groups; g < (h + 1) * p.groups; g++) {
      int count = 0;
      for (int64_t i = step * p.queries; i < (step + 1) * p.queries; i++) {
        if (p.answered && !p.answered[b * p.steps * p.queries + i]) continue;
        float *row = &questions[count++ * w.fill];
        copy_rows(p.query.at<Q>(b, g, i), 0, 1, w.dim, w.fill, row);
        scale(row, p.scale, w.fill);
        add(asked_total.data(), row, 1.0f, w.fill);
      }
      asked += count;
      // The last rows of squares may be of no dimension: nobody reads them.
      for (int d = 0; d < w.dim; d += SOME)
        mix<SOME>(questions.data(), w.fill, count, w.fill, &questions[d], w.fill, &asked_square[d * w.fill], w.fill);
    }
  }

  void take_up(int64_t step, Group &into) {
    const int64_t b = head / p.heads, h = head % p.heads;
    into.used = 0;
    for (int64_t e = (head * p.steps + step) * p.leaving; e < (head * p.steps + step + 1) * p.leaving; e++) {
      if (!p.real[e]) continue;
      float *row = into.append();
      copy_rows(p.key.at<T>(b, h, p.index[e]), 0, 1, w.dim, w.dim, row);
      copy_rows(p.value.at<T>(b, h, p.index[e]), 0, 1, w.value_dim, w.span - w.dim, row + w.dim);
      add(seen_total.data(), row, 1.0f, w.span);
      seen_square += product(row + w.dim, row + w.dim, w.value_dim);
      seen += 1.0f;
    }
  }

  void set(Metric &metric) const {
    // One imagined query of covariance I / D, as `RunningQueries.moments` has it.
    const float weight = 1.0f / (asked + 1.0f);
    for (int d = 0; d < w.dim; d++) metric.mean_query[d] = asked_total[d] * weight;
    for (int c = 0; c < w.dim; c += TILE)
      for (int d = 0; d < w.dim; d++) {
        float *to = &metric.form[c * w.dim + d * TILE];
        for (int e = 0; e < std::min(TILE, w.fill - c); e += LANES)
          store(to + e, load(&asked_square[d * w.fill + c + e]) * weight);
        if (d >= c && d < c + TILE) to[d - c] += weight / w.dim;
      }
    for (int d = 0; d < w.wide; d++) metric.mean[d] = seen_total[d] / seen;
    const float *value_mean = &metric.mean[w.dim];
    const float variance = seen_square / seen - product(value_mean, value_mean, w.value_dim);
    metric.unit = 1.0f / std::max(variance, 1.1920929e-07f);
    metric.tilt = p.tilted ? p.tilt : 0.0f;
  }
};

// The stand-ins of one head.
class Walker {
 public:
  Walker(const Past &p, int64_t head)
      : p(p), head(head), w(p.dim, p.value_dim), known(w, p.count + p.leaving, p.lowest) {
    for (int64_t c = head * p.count; c < (head + 1) * p.count; c++) {
      if (p.size[c] == 0.0f) continue;
      std::copy_n(p.rows + c * w.wide, w.wide, known.append());
      known.excess[known.used - 1] = p.excess[c], known.size[known.used - 1] = p.size[c];
    }
  }

  void take(const Batch &batch, Moves *moves = nullptr) {
    const int before = known.used, new_ones = batch.surplus / 2;
    if (batch.surplus) known.measure(batch.metric);
    known.append(batch.fresh);
    if (moves) moves->begin(known.used);
    if (!batch.surplus) return;
    known.join(batch.metric, new_ones, before, moves);
    known.join(batch.metric, batch.surplus - new_ones, 0, moves);
    known.settle(batch.metric);
  }

  // Takes them, and writes where everything goes.
  void take_and_tell(const Batch &batch, int64_t step, Moves &moves) {
    const int before = known.used;
    take(batch, &moves);
    const int64_t both = p.count + p.leaving, at = (head * p.steps + step) * both;
    const uint8_t *real = p.real + (head * p.steps + step) * p.leaving;
    for (int64_t i = 0, next = before; i < both; i++) {
      const bool is_there = i < p.count ? i < before : real[i - p.count];
      const int64_t from = i < p.count ? i : next;
      p.place[at + i] = is_there ? moves.place[from] : 0;
      p.share[at + i] = is_there ? moves.share[from] : 0.0f;
      next += i >= p.count && is_there;
    }
  }

  // Rows (M, D + Dv), excess (M), and size (M) if wanted.
  void write(float *to_rows, float *to_excess, float *to_size) const {
    const int used = known.used;
    for (int c = 0; c < used; c++) std::copy_n(&known.rows[c * w.span], w.wide, to_rows + (int64_t)c * w.wide);
    std::fill(to_rows + (int64_t)used * w.wide, to_rows + p.count * w.wide, 0.0f);
    std::fill(std::copy_n(known.excess.begin(), used, to_excess), to_excess + p.count, -INFINITY);
    if (to_size) std::fill(std::copy_n(known.size.begin(), used, to_size), to_size + p.count, 0.0f);
  }

  // What is known at the end.
  void finish() const {
    write(p.rows + head * p.count * w.wide, p.excess + head * p.count, p.size + head * p.count);
  }

 private:
  const Past &p;
  const int64_t head;
  const Widths w;
  MergingGroup known;
};

template <class Q, class T>
static void walk(const Past &p, int threads) {
  const int64_t wide = p.dim + p.value_dim;
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
  for (int64_t head = 0; head < p.batch * p.heads; head++) {
    Arrivals<Q, T> arrivals(p, head);
    Walker walker(p, head);
    Batch batch(p, Widths(p.dim, p.value_dim));
    Moves moves;
    for (int64_t step = 0; step <= p.steps; step++) {
      if (step) {
        arrivals.make(step - 1, batch);
        p.place ? walker.take_and_tell(batch, step - 1, moves) : walker.take(batch);
      }
      const int64_t at = (head * (p.steps + 1) + step) * p.count;
      walker.write(p.rows_by + at * wide, p.excess_by + at, p.size_by + at);
    }
    walker.finish();
    arrivals.finish();
  }
}

// The gradients of a walk, which is linear given its moves: `fewkeys.past.gradient`.
struct PastBack {
  const float *rows_by, *last;  // that come: (B Hkv, steps + 1, M, D + Dv), (B Hkv, M, D + Dv)
  const int64_t *place;         // the moves: (B Hkv, steps, M + E)
  const float *share;
  const int64_t *index;         // (B Hkv, steps, E)
  float *rows;                  // of the rows at the beginning: (B Hkv, M, D + Dv)
  float *key, *value;           // (B Hkv, Nk, D), (B Hkv, Nk, Dv): zeros, to be added to
  int64_t heads, keys, dim, value_dim, count, steps, leaving;
};

static void walk_back(const PastBack &p, int64_t head) {
  const int64_t wide = p.dim + p.value_dim, size = p.count * wide;
  const float *by = p.rows_by + head * (p.steps + 1) * size, *last = p.last + head * size;
  Numbers<float> flow(by + p.steps * size, by + (p.steps + 1) * size), before(size);
  add(flow.data(), last, 1.0f, size);
  for (int64_t step = p.steps - 1; step >= 0; step--) {
    const int64_t at = head * p.steps + step, first = at * (p.count + p.leaving);
    std::copy_n(by + step * size, size, before.data());
    for (int64_t i = 0; i < p.count + p.leaving; i++) {
      const float share = p.share[first + i], *from = &flow[p.place[first + i] * wide];
      if (share == 0.0f) continue;
      if (i < p.count) {
        add(&before[i * wide], from, share, wide);
        continue;
      }
      const int64_t key = head * p.keys + p.index[at * p.leaving + i - p.count];
      add(p.key + key * p.dim, from, share, p.dim);
      add(p.value + key * p.value_dim, from + p.dim, share, p.value_dim);
    }
    flow.swap(before);
  }
  std::copy_n(flow.data(), size, p.rows + head * size);
}

extern "C" void fewkeys_walk_back(const PastBack *p, int threads) {
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
  for (int64_t head = 0; head < p->heads; head++) walk_back(*p, head);
}

extern "C" void fewkeys_walk(const Past *p, int is_bf16, int query_is_bf16, int threads) {
  if (query_is_bf16)
    is_bf16 ? walk<bf16, bf16>(*p, threads) : walk<bf16, float>(*p, threads);
  else
    is_bf16 ? walk<float, bf16>(*p, threads) : walk<float, float>(*p, threads);
}
