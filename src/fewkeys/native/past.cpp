// How the means of the past move on, block by block: `fewkeys.sketch.summary` has the equations.
#include <algorithm>
#include <vector>

#include "tile.h"

struct Past {
  // What is known at the beginning, one after the other for every key head; at the end, what is known then.
  float *rows, *excess, *size;                        // (B Hkv, M, D + Dv), (B Hkv, M), (B Hkv, M)
  float *seen, *seen_key, *seen_value, *seen_square;  // (B Hkv), (B Hkv, D), (B Hkv, Dv), (B Hkv)
  float *asked, *asked_total, *asked_square;          // (B Hkv), (B Hkv, D), (B Hkv, D, D)
  // What is known at the beginning and after every step.
  float *rows_by, *excess_by, *size_by;  // (B Hkv, steps + 1, M, D + Dv), (B Hkv, steps + 1, M), the same
  // Every step's queries, and the keys that it takes up.
  Rows query;               // (B, Hq, steps x S, D)
  const uint8_t *answered;  // (B, steps x S), ones for queries that count; or null: all do
  Rows key, value;
  const int64_t *index;  // (B Hkv, steps, E)
  const uint8_t *real;   // (B Hkv, steps, E)
  int64_t batch, heads, groups, dim, value_dim, count, steps, queries, leaving, rounds, tilted;
  float scale, tilt, lowest;
};

// One head: the stand-ins at hand, in the order of their coming, and what a step needs to merge them.
class Walker {
 public:
  Walker(const Past &p, int64_t head)
      : p(p), head(head), dim(p.dim), wide(p.dim + p.value_dim), span(filled(p.dim + filled(p.value_dim))), most(p.count + p.leaving),
        fill(filled(p.dim)), rows(most * span), image(most * fill), sorted(most * span), found((most + TILE) * TILE), lanes(wide * TILE), form(dim * (dim + TILE)),
        mean(span + LANES), mean_query(fill), asked_total(fill), asked_square((dim + SOME) * fill), seen_total(span),
        questions(p.queries * fill), excess(most), size(most), log_mass(most), total(most), mass(most + TILE),
        lightness(most + TILE), square(most + TILE), least(most + TILE), key(most + TILE), rank(most + TILE),
        partner(most + TILE), order(most), slot(most), alive(most), merged(most) {
    for (int64_t c = head * p.count; c < (head + 1) * p.count; c++) {
      if (p.size[c] == 0.0f) continue;
      std::copy(p.rows + c * wide, p.rows + (c + 1) * wide, &rows[used * span]);
      excess[used] = p.excess[c];
      size[used++] = p.size[c];
    }
    asked = p.asked[head], seen = p.seen[head], seen_square = p.seen_square[head];
    std::copy_n(p.asked_total + head * dim, dim, asked_total.begin());
    for (int d = 0; d < dim; d++) std::copy_n(p.asked_square + (head * dim + d) * dim, dim, &asked_square[d * fill]);
    std::copy_n(p.seen_key + head * dim, dim, seen_total.begin());
    std::copy_n(p.seen_value + head * p.value_dim, p.value_dim, seen_total.begin() + dim);
  }

  template <class Q, class T>
  void move(int64_t step) {
    ask<Q>(step);
    const int known = used;
    take_up<T>(step);
    if (used > p.count) reduce(known);
  }

  // The stand-ins: rows (M, D + Dv), excess (M), and size (M) if wanted.
  void write(float *to_rows, float *to_excess, float *to_size) const {
    for (int c = 0; c < used; c++) std::copy_n(&rows[c * span], wide, to_rows + (int64_t)c * wide);
    std::fill(to_rows + (int64_t)used * wide, to_rows + p.count * wide, 0.0f);
    std::fill(std::copy_n(excess.begin(), used, to_excess), to_excess + p.count, -INFINITY);
    if (to_size) std::fill(std::copy_n(size.begin(), used, to_size), to_size + p.count, 0.0f);
  }

  // What is known at the end.
  void finish() const {
    write(p.rows + head * p.count * wide, p.excess + head * p.count, p.size + head * p.count);
    p.asked[head] = asked, p.seen[head] = seen, p.seen_square[head] = seen_square;
    std::copy_n(asked_total.begin(), dim, p.asked_total + head * dim);
    for (int d = 0; d < dim; d++) std::copy_n(&asked_square[d * fill], dim, p.asked_square + (head * dim + d) * dim);
    std::copy_n(seen_total.begin(), dim, p.seen_key + head * dim);
    std::copy_n(seen_total.begin() + dim, p.value_dim, p.seen_value + head * p.value_dim);
  }

 private:
  const Past &p;
  const int64_t head;
  // Rows of key and value side by side are `span` apart, filled up with zeros; those of keys alone, `fill`.
  const int dim, wide, span, most, fill;
  int used = 0;
  // image: keys less their mean, multiplied by the metric; sorted: rows less their mean, in the order of mass.
  std::vector<float> rows, image, sorted, found, lanes, form, mean, mean_query;
  std::vector<float> asked_total, asked_square, seen_total, questions;
  float asked, seen, seen_square, unit = 0.0f;
  std::vector<float> excess, size, log_mass, total;
  std::vector<float> mass, lightness, square, least;  // in the order of mass, as what follows
  std::vector<int> key, rank, partner, order, slot;
  std::vector<uint8_t> alive, merged;

  template <class Q>
  void ask(int64_t step) {
    const int64_t b = head / p.heads, h = head % p.heads;
    for (int64_t g = h * p.groups; g < (h + 1) * p.groups; g++) {
      int count = 0;
      for (int64_t i = step * p.queries; i < (step + 1) * p.queries; i++) {
        if (p.answered && !p.answered[b * p.steps * p.queries + i]) continue;
        float *row = &questions[count++ * fill];
        copy_rows(p.query.at<Q>(b, g, i), 0, 1, dim, fill, row);
        for (int d = 0; d < fill; d += LANES) store(row + d, load(row + d) * p.scale);
        add(asked_total.data(), row, 1.0f, fill);
      }
      asked += count;
      // The last rows of squares may be of no dimension: nobody reads them.
      for (int d = 0; d < dim; d += SOME)
        mix<SOME>(questions.data(), fill, count, fill, &questions[d], fill, &asked_square[d * fill], fill);
    }
  }

  template <class T>
  void take_up(int64_t step) {
    const int64_t b = head / p.heads, h = head % p.heads;
    for (int64_t e = (head * p.steps + step) * p.leaving; e < (head * p.steps + step + 1) * p.leaving; e++) {
      if (!p.real[e]) continue;
      float *row = &rows[used * span];
      copy_rows(p.key.at<T>(b, h, p.index[e]), 0, 1, dim, dim, row);
      copy_rows(p.value.at<T>(b, h, p.index[e]), 0, 1, p.value_dim, span - dim, row + dim);
      add(seen_total.data(), row, 1.0f, span);
      seen_square += product(row + dim, row + dim, p.value_dim);
      seen += 1.0f;
      excess[used] = 0.0f;
      size[used++] = 1.0f;
    }
  }

  // The stand-ins from `known` on are new.
  void reduce(int known) {
    measure();
    std::fill(alive.begin(), alive.end(), 1);
    std::fill(merged.begin(), merged.end(), 0);
    const int surplus = used - p.count, among_new = surplus / 2;
    for (int joining = among_new, left = p.rounds; left > 0; left--) {
      const int now = (joining + left - 1) / left;
      join(known, now);
      joining -= now;
    }
    join(0, surplus - among_new);
    settle();
  }

  // The metric of this step; the images of the rows and their masses in it.
  void measure() {
    // One imagined query of covariance I / D, as `RunningQueries.moments` has it. Columns come a tile at a time.
    const float weight = 1.0f / (asked + 1.0f);
    for (int d = 0; d < dim; d++) mean_query[d] = asked_total[d] * weight;
    for (int c = 0; c < dim; c += TILE)
      for (int d = 0; d < dim; d++) {
        float *to = &form[c * dim + d * TILE];
        for (int e = 0; e < std::min(TILE, fill - c); e += LANES)
          store(to + e, load(&asked_square[d * fill + c + e]) * weight);
        if (d >= c && d < c + TILE) to[d - c] += weight / dim;
      }
    for (int d = 0; d < wide; d++) mean[d] = seen_total[d] / seen;
    const float variance = seen_square / seen - product(&mean[dim], &mean[dim], p.value_dim);
    unit = 1.0f / std::max(variance, 1.1920929e-07f);
    // Images are those of the keys less that of the mean.
    for (int c = 0; c < dim; c += TILE) {
      float middle[TILE];
      dots(mean.data(), span, 1, dim, &form[c * dim], middle);
      dots(rows.data(), span, used, dim, &form[c * dim], found.data());
      for (int a = 0; a < used; a++)
        for (int d = 0; d < std::min(TILE, fill - c); d += LANES)
          store(&image[a * fill + c + d], load(&found[a * TILE + d]) - load(middle + d));
    }
    for (int a = 0; a < used; a++) log_mass[a] = excess[a] + log_weight(&rows[a * span], &image[a * fill]);
  }

  // t g for the centred key x, from m . x and E (q . x)^2 = x^T C x + (m . x)^2. Beyond dim, m and image are zero.
  float log_weight(const float *row, const float *image) const {
    if (!p.tilted) return 0.0f;
    vec first = {}, second = {};
    for (int d = 0; d < dim; d += LANES) {
      const vec x = load(row + d) - load(&mean[d]);
      first += x * load(&mean_query[d]);
      second += x * load(image + d);
    }
    const float along = total_of(first), energy = total_of(second);
    return p.tilt * (along + 0.5f * (energy - along * along));
  }

  // Of the stand-ins from `first` on, `joining` join the partner of larger mass that costs least, the cheapest first,
  // all at once.
  void join(int first, int joining) {
    if (joining == 0) return;
    const int count = arrange(first);
    for (int tile = 0; tile < count; tile += TILE) {
      const int end = std::min(tile + TILE, count);
      // The images of the rows: of the keys as measured, of the values in their unit.
      const auto image_at = [this, tile](int i) { return &image[slot[tile + i] * fill]; };
      turn(image_at, end - tile, dim, 1.0f, lanes.data());
      to_lanes(&sorted[tile * span + dim], span, end - tile, p.value_dim, unit, &lanes[dim * TILE]);
      dots(sorted.data(), span, end, wide, lanes.data(), found.data());
      for (int i = tile; i < end; i++) square[i] = found[i * TILE + i - tile];
      for (int part = 0; part < TILE; part += LANES) seek(tile, part, end);
    }
    for (int i = 0; i < count; i++) key[i] = ascending(least[i]);
    // Nobody is heavier than the first; even where costs overflow it stays.
    key[0] = INT32_MAX;
    by_key(count);
    for (int i = 0; i < count; i++) total[i] = 1.0f;
    for (int i = 0; i < count; i++) {
      if (rank[i] >= joining) continue;
      int leader = partner[i];
      while (rank[leader] < joining) leader = partner[leader];
      const int a = slot[i], to = slot[leader];
      const float share = std::exp(mass[i] - mass[leader]);
      add(&rows[to * span], &rows[a * span], share, span);
      add(&image[to * fill], &image[a * fill], share, fill);
      total[leader] += share;
      size[to] += size[a];
      alive[a] = 0, merged[to] = 1;
    }
    for (int i = 0; i < count; i++) {
      if (total[i] == 1.0f) continue;
      scale(&rows[slot[i] * span], 1.0f / total[i], span);
      scale(&image[slot[i] * fill], 1.0f / total[i], fill);
      log_mass[slot[i]] += std::log(total[i]);
    }
  }

  // Those from `first` on that are left, by mass: the largest first, of equal ones the earlier. Returns their number.
  int arrange(int first) {
    int count = 0;
    for (int a = first; a < used; a++) {
      if (!alive[a]) continue;
      key[count] = ascending(0.0f - log_mass[a]);
      order[count++] = a;
    }
    by_key(count);
    for (int i = 0; i < count; i++) slot[rank[i]] = order[i];
    for (int i = 0; i < count; i++) {
      mass[i] = log_mass[slot[i]];
      const float *row = &rows[slot[i] * span];
      for (int d = 0; d < span; d += LANES) store(&sorted[i * span + d], load(row + d) - load(&mean[d]));
    }
    const vec top = all(mass[0]), lowest = all(p.lowest);
    for (int i = 0; i < count; i += LANES)
      store(&lightness[i], inverse(exponential(larger(load(&mass[i]) - top, lowest))));
    return count;
  }

  // The cheapest partner, among those before it, of each of LANES stand-ins; of equal costs, the first.
  void seek(int tile, int part, int end) {
    const ivec own = count_up() + tile + part;
    const vec light = load(&lightness[tile + part]), mine = load(&square[tile + part]);
    vec best = all(INFINITY);
    ivec whose = own - 1;
    for (int b = 0; b < end; b++) {
      const vec apart = larger(mine + square[b] - 2.0f * load(&found[b * TILE + part]), vec{});
      const vec cost = apart * inverse(light + lightness[b]);
      const ivec closer = (cost < best) & (own > b);
      best = closer ? cost : best;
      whose = closer ? ivec{} + b : whose;
    }
    store(&least[tile + part], best);
    memcpy(&partner[tile + part], &whose, sizeof whose);
  }

  // Every key's place in ascending order, of equal ones the earlier first: for so few, counting is faster than sorting.
  void by_key(int count) {
    for (int a = 0; a < count; a += LANES) {
      ivec own, smaller = {};
      memcpy(&own, &key[a], sizeof own);
      const ivec lane = count_up() + a;
      const int near = std::min(a + LANES, count);
      for (int b = 0; b < a; b++) smaller -= own >= key[b];
      for (int b = a; b < near; b++) smaller -= (own > key[b]) | ((own == key[b]) & (lane > b));
      for (int b = near; b < count; b++) smaller -= own > key[b];
      memcpy(&rank[a], &smaller, sizeof smaller);
    }
  }

  // Those that are left move to the front; who met somebody gets the excess that keeps its mass.
  void settle() {
    int kept = 0;
    for (int a = 0; a < used; a++) {
      if (!alive[a]) continue;
      if (kept != a) copy(&rows[kept * span], &rows[a * span], span);
      excess[kept] = merged[a] ? log_mass[a] - log_weight(&rows[kept * span], &image[a * fill]) : excess[a];
      size[kept++] = size[a];
    }
    used = kept;
  }

  // The bits of x as an integer whose order is that of the numbers.
  static int ascending(float x) {
    int bits;
    memcpy(&bits, &x, sizeof bits);
    return bits ^ ((bits >> 31) & INT32_MAX);
  }

  // 1 / x for x between 1e-3 and 1e5, to float32's rounding: Newton's steps are faster than the division.
  static vec inverse(vec x) {
    vec found = (vec)(ivec{} + 0x7ef311c3 - (ivec)x);
    for (int i = 0; i < 3; i++) found *= 2.0f - x * found;
    return found;
  }

  static float total_of(vec x) {
    float part[LANES];
    store(part, x);
    for (int half = LANES / 2; half > 0; half /= 2)
      for (int i = 0; i < half; i++) part[i] += part[i + half];
    return part[0];
  }

  static float product(const float *x, const float *y, int count) {
    vec sum = {};
    int d = 0;
    for (; d + LANES <= count; d += LANES) sum += load(x + d) * load(y + d);
    float found = 0.0f;
    for (; d < count; d++) found += x[d] * y[d];
    return found + total_of(sum);
  }

  static void copy(float *to, const float *from, int count) {
    for (int d = 0; d < count; d += LANES) store(to + d, load(from + d));
  }

  static void add(float *to, const float *from, float share, int count) {
    for (int d = 0; d < count; d += LANES) store(to + d, load(to + d) + load(from + d) * share);
  }

  static void scale(float *to, float by, int count) {
    for (int d = 0; d < count; d += LANES) store(to + d, load(to + d) * by);
  }
};

template <class Q, class T>
static void walk(const Past &p, int threads) {
  const int64_t wide = p.dim + p.value_dim;
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
  for (int64_t head = 0; head < p.batch * p.heads; head++) {
    Walker walker(p, head);
    for (int64_t step = 0; step <= p.steps; step++) {
      if (step) walker.move<Q, T>(step - 1);
      const int64_t at = (head * (p.steps + 1) + step) * p.count;
      walker.write(p.rows_by + at * wide, p.excess_by + at, p.size_by + at);
    }
    walker.finish();
  }
}

extern "C" void fewkeys_walk(const Past *p, int is_bf16, int query_is_bf16, int threads) {
  if (query_is_bf16)
    is_bf16 ? walk<bf16, bf16>(*p, threads) : walk<bf16, float>(*p, threads);
  else
    is_bf16 ? walk<float, bf16>(*p, threads) : walk<float, float>(*p, threads);
}
