// Updates the means of the past, block by block: `fewkeys.past.scan`.
#pragma once
#include "merge.h"

namespace fewkeys {

// The input of one step: its keys, and the metric in which stand-ins merge.
struct Step {
  Metric metric;
  Group fresh;
  int surplus = 0;  // how many have to merge

  Step(const Past &p, const Widths &w) : metric(w), fresh(w, p.evicted) {}
};

// Copies one row as floats, padded with zeros to `width`.
static inline void copy_row(const Rows &rows, bool is_bf16, int64_t b, int64_t h, int64_t n, int dim, int width,
                            float *into) {
  is_bf16 ? copy_rows(rows.at<bf16>(b, h, n), 0, 1, dim, width, into)
          : copy_rows(rows.at<float>(b, h, n), 0, 1, dim, width, into);
}

// The part of the steps that does not depend on the stand-ins: statistics of queries and keys.
class Inflow {
 public:
  Inflow(const Past &p, int64_t head, bool is_bf16, bool query_is_bf16)
      : p(p), head(head), is_bf16(is_bf16), query_is_bf16(query_is_bf16), w(p.dim, p.value_dim), asked_total(w.fill),
        asked_square((w.dim + SOME) * w.fill), seen_total(w.span), queries(p.queries * w.fill) {
    const int dim = w.dim;
    for (int64_t c = head * p.count; c < (head + 1) * p.count; c++) stand_ins += p.size[c] != 0.0f;
    asked = p.asked[head], seen = p.seen[head], seen_square = p.seen_square[head];
    std::copy_n(p.asked_total + head * dim, dim, asked_total.begin());
    for (int d = 0; d < dim; d++) std::copy_n(p.asked_square + (head * dim + d) * dim, dim, &asked_square[d * w.fill]);
    std::copy_n(p.seen_key + head * dim, dim, seen_total.begin());
    std::copy_n(p.seen_value + head * w.value_dim, w.value_dim, seen_total.begin() + dim);
  }

  void make(int64_t number, Step &step) {
    absorb_queries(number);
    absorb_keys(number, step.fresh);
    step.surplus = std::max<int>(0, stand_ins + step.fresh.used - p.count);
    stand_ins += step.fresh.used - step.surplus;
    if (!step.surplus) return;
    set(step.metric);
    step.fresh.measure(step.metric);
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
  const bool is_bf16, query_is_bf16;
  const Widths w;
  int stand_ins = 0;  // stand-ins after the steps so far
  aligned_vector<float> asked_total, asked_square, seen_total, queries;
  float asked, seen, seen_square;

  void absorb_queries(int64_t step) {
    const int64_t b = head / p.heads, h = head % p.heads;
    for (int64_t g = h * p.gqa_ratio; g < (h + 1) * p.gqa_ratio; g++) {
      int count = 0;
      for (int64_t i = step * p.queries; i < (step + 1) * p.queries; i++) {
        if (p.answered && !p.answered[b * p.steps * p.queries + i]) continue;
        float *row = &queries[count++ * w.fill];
        copy_row(p.query, query_is_bf16, b, g, i, w.dim, w.fill, row);
        scale(row, p.scale, w.fill);
        add(asked_total.data(), row, 1.0f, w.fill);
      }
      asked += count;
      // The last rows of squares may be padding, which is not read.
      for (int d = 0; d < w.dim; d += SOME)
        mix(queries.data(), w.fill, count, w.fill, &queries[d], w.fill, &asked_square[d * w.fill], w.fill);
    }
  }

  void absorb_keys(int64_t step, Group &into) {
    const int64_t b = head / p.heads, h = head % p.heads;
    into.used = 0;
    for (int64_t e = (head * p.steps + step) * p.evicted; e < (head * p.steps + step + 1) * p.evicted; e++) {
      if (!p.real[e]) continue;
      float *row = into.append();
      copy_row(p.key, is_bf16, b, h, p.index[e], w.dim, w.dim, row);
      copy_row(p.value, is_bf16, b, h, p.index[e], w.value_dim, w.span - w.dim, row + w.dim);
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
class Summary {
 public:
  Summary(const Past &p, int64_t head)
      : p(p), head(head), w(p.dim, p.value_dim), group(w, p.count + p.evicted, p.lowest) {
    for (int64_t c = head * p.count; c < (head + 1) * p.count; c++) {
      if (p.size[c] == 0.0f) continue;
      std::copy_n(p.rows + c * w.wide, w.wide, group.append());
      group.excess[group.used - 1] = p.excess[c], group.size[group.used - 1] = p.size[c];
    }
  }

  void absorb(const Step &step, Moves *moves = nullptr) {
    const int before = group.used, new_ones = step.surplus / 2;
    if (step.surplus) group.measure(step.metric);
    group.append(step.fresh);
    if (moves) moves->begin(group.used);
    if (!step.surplus) return;
    group.join(step.metric, new_ones, before, moves);
    group.join(step.metric, step.surplus - new_ones, 0, moves);
    group.settle(step.metric);
  }

  // The same; also writes where every row goes.
  void absorb(const Step &step, int64_t number, Moves &moves) {
    const int before = group.used;
    absorb(step, &moves);
    const int64_t both = p.count + p.evicted, at = (head * p.steps + number) * both;
    const uint8_t *real = p.real + (head * p.steps + number) * p.evicted;
    for (int64_t i = 0, next = before; i < both; i++) {
      const bool is_there = i < p.count ? i < before : real[i - p.count];
      const int64_t from = i < p.count ? i : next;
      p.place[at + i] = is_there ? moves.place[from] : 0;
      p.coefficient[at + i] = is_there ? moves.coefficient[from] : 0.0f;
      next += i >= p.count && is_there;
    }
  }

  // Writes rows (M, D + Dv), excess and size (M).
  void write(float *to_rows, float *to_excess, float *to_size) const {
    const int used = group.used;
    for (int c = 0; c < used; c++) std::copy_n(&group.rows[c * w.span], w.wide, to_rows + (int64_t)c * w.wide);
    std::fill(to_rows + (int64_t)used * w.wide, to_rows + p.count * w.wide, 0.0f);
    std::fill(std::copy_n(group.excess.begin(), used, to_excess), to_excess + p.count, -INFINITY);
    std::fill(std::copy_n(group.size.begin(), used, to_size), to_size + p.count, 0.0f);
  }

  // What is known at the end.
  void finish() const {
    write(p.rows + head * p.count * w.wide, p.excess + head * p.count, p.size + head * p.count);
  }

 private:
  const Past &p;
  const int64_t head;
  const Widths w;
  MergingGroup group;
};

static void scan(const Past &p, bool is_bf16, bool query_is_bf16, int threads) {
  const int64_t wide = p.dim + p.value_dim;
  in_parallel(threads, p.batch * p.heads, [&](int64_t head) {
    Inflow inflow(p, head, is_bf16, query_is_bf16);
    Summary summary(p, head);
    Step now(p, Widths(p.dim, p.value_dim));
    Moves moves;
    for (int64_t step = 0; step <= p.steps; step++) {
      Team::check();
      if (step) {
        inflow.make(step - 1, now);
        p.place ? summary.absorb(now, step - 1, moves) : summary.absorb(now);
      }
      const int64_t at = (head * (p.steps + 1) + step) * p.count;
      summary.write(p.rows_by + at * wide, p.excess_by + at, p.size_by + at);
    }
    summary.finish();
    inflow.finish();
  });
}

}  // namespace fewkeys
