// How the means of the past move on, block by block: `fewkeys.sketch.summary` has the equations.
#include <algorithm>
#include <vector>

#include "lanes.h"

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
      : p(p), head(head), dim(p.dim), wide(p.dim + p.value_dim), most(p.count + p.leaving),
        pitch((most + TILE - 1) / TILE * TILE), fill(filled(p.dim)), rows(most * wide), centred(most * wide),
        found(pitch * TILE), gram(pitch * pitch), lanes(wide * TILE), on_query(dim * TILE), form(dim * dim), mean(wide),
        mean_query(dim), asked_total(fill), asked_square((dim + SOME) * fill), seen_total(wide),
        questions(p.queries * fill), excess(most), size(most), log_mass(pitch), lightness(pitch), square(pitch),
        least(pitch), total(most), keys(most), rank(pitch), partner(pitch), order(most), alive(most), merged(most) {
    for (int64_t c = head * p.count; c < (head + 1) * p.count; c++) {
      if (p.size[c] == 0.0f) continue;
      std::copy(p.rows + c * wide, p.rows + (c + 1) * wide, &rows[used * wide]);
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
  void walk() {
    write(p.rows_by, p.excess_by, p.size_by, head * (p.steps + 1));
    for (int64_t step = 0; step < p.steps; step++) {
      ask<Q>(step);
      take_up<T>(step);
      if (used > p.count) reduce();
      write(p.rows_by, p.excess_by, p.size_by, head * (p.steps + 1) + step + 1);
    }
    write(p.rows, p.excess, p.size, head);
    p.asked[head] = asked, p.seen[head] = seen, p.seen_square[head] = seen_square;
    std::copy_n(asked_total.begin(), dim, p.asked_total + head * dim);
    for (int d = 0; d < dim; d++) std::copy_n(&asked_square[d * fill], dim, p.asked_square + (head * dim + d) * dim);
    std::copy_n(seen_total.begin(), dim, p.seen_key + head * dim);
    std::copy_n(seen_total.begin() + dim, p.value_dim, p.seen_value + head * p.value_dim);
  }

 private:
  const Past &p;
  const int64_t head;
  const int dim, wide, most, pitch, fill;
  int used = 0;
  std::vector<float> rows, centred, found, gram, lanes, on_query, form, mean, mean_query;
  std::vector<float> asked_total, asked_square, seen_total, questions;
  float asked, seen, seen_square;
  std::vector<float> excess, size, log_mass, lightness, square, least, total;
  std::vector<uint64_t> keys;
  std::vector<int> rank, partner, order;
  std::vector<uint8_t> alive, merged;

  template <class Q>
  void ask(int64_t step) {
    const int64_t b = head / p.heads, h = head % p.heads;
    for (int64_t g = h * p.groups; g < (h + 1) * p.groups; g++) {
      int count = 0;
      for (int64_t i = step * p.queries; i < (step + 1) * p.queries; i++) {
        if (p.answered && !p.answered[b * p.steps * p.queries + i]) continue;
        const Q *from = p.query.at<Q>(b, g, i);
        float *row = &questions[count++ * fill];
        for (int d = 0; d < dim; d++) asked_total[d] += row[d] = number(from[d]) * p.scale;
      }
      asked += count;
      // The last rows of squares may be of no dimension: nobody reads them.
      for (int d = 0; d < dim; d += SOME)
        mix<SOME>(questions.data(), fill, count, fill, &questions[d], fill, &asked_square[d * fill], fill);
    }
  }

  template <class T>
  void take_up(int64_t step) {
    for (int64_t e = (head * p.steps + step) * p.leaving; e < (head * p.steps + step + 1) * p.leaving; e++) {
      if (!p.real[e]) continue;
      const T *key = p.key.at<T>(head / p.heads, head % p.heads, p.index[e]);
      const T *value = p.value.at<T>(head / p.heads, head % p.heads, p.index[e]);
      float *row = &rows[used * wide];
      for (int d = 0; d < dim; d++) row[d] = number(key[d]);
      for (int d = dim; d < wide; d++) row[d] = number(value[d - dim]);
      for (int d = 0; d < wide; d++) seen_total[d] += row[d];
      vec sum = {};
      int d = dim;
      for (; d + LANES <= wide; d += LANES) sum += load(row + d) * load(row + d);
      for (; d < wide; d++) seen_square += row[d] * row[d];
      for (int i = 0; i < LANES; i++) seen_square += sum[i];
      seen += 1.0f;
      excess[used] = 0.0f;
      size[used++] = 1.0f;
    }
  }

  void reduce() {
    measure();
    std::fill(alive.begin(), alive.end(), 1);
    std::fill(merged.begin(), merged.end(), 0);
    int surplus = used - p.count;
    for (int left = p.rounds; left > 0; left--) {
      const int joining = (surplus + left - 1) / left;
      join(joining, left > 1);
      surplus -= joining;
    }
    settle();
  }

  // t g for the centred key x, from m . x and E (q . x)^2 = x^T C x + (m . x)^2.
  float log_weight(float along, float energy) const {
    return p.tilted ? p.tilt * (along + 0.5f * (energy - along * along)) : 0.0f;
  }

  // The metric of this step; the centred rows, their Gram matrix in it, and their masses.
  void measure() {
    // One imagined query of covariance I / D, as `RunningQueries.moments` has it.
    const float weight = 1.0f / (asked + 1.0f);
    for (int d = 0; d < dim; d++) {
      mean_query[d] = asked_total[d] * weight;
      for (int e = 0; e < dim; e++) form[d * dim + e] = asked_square[d * fill + e] * weight;
      form[d * dim + d] += weight / dim;
    }
    float variance = seen_square / seen;
    for (int d = 0; d < wide; d++) mean[d] = seen_total[d] / seen;
    for (int d = dim; d < wide; d++) variance -= mean[d] * mean[d];
    const float unit = 1.0f / std::max(variance, 1.1920929e-07f);
    for (int a = 0; a < used; a++)
      for (int d = 0; d < wide; d++) centred[a * wide + d] = rows[a * wide + d] - mean[d];
    for (int first = 0; first < used; first += TILE) {
      const int some = std::min(TILE, used - first);
      to_lanes(&centred[first * wide], wide, some, wide, 1.0f, lanes.data());
      dots(form.data(), dim, dim, dim, lanes.data(), on_query.data());
      float along[TILE], energy[TILE];
      for (int v = 0; v < TILE; v += LANES) {
        vec m = {}, s = {};
        for (int d = 0; d < dim; d++) {
          const vec x = load(&lanes[d * TILE + v]);
          m += x * mean_query[d];
          s += x * load(&on_query[d * TILE + v]);
        }
        store(along + v, m);
        store(energy + v, s);
        for (int d = dim; d < wide; d++) store(&lanes[d * TILE + v], load(&lanes[d * TILE + v]) * unit);
      }
      for (int i = 0; i < some; i++) log_mass[first + i] = excess[first + i] + log_weight(along[i], energy[i]);
      std::copy(on_query.begin(), on_query.end(), lanes.begin());
      dots(centred.data(), wide, first + some, wide, lanes.data(), found.data());
      // Kept both ways. The last rows may be of nobody: nobody reads them.
      for (int b = 0; b < first + some; b++) std::copy_n(&found[b * TILE], TILE, &gram[b * pitch + first]);
      for (int b = 0; b < first; b += LANES)
        for (int part = 0; part < TILE; part += LANES) {
          vec x[LANES];
          for (int i = 0; i < LANES; i++) x[i] = load(&found[(b + i) * TILE + part]);
          transpose<LANES / 2>(x);
          for (int i = 0; i < LANES; i++) store(&gram[(first + part + i) * pitch + b], x[i]);
        }
      for (int i = 0; i < some; i++) square[first + i] = found[(first + i) * TILE + i];
    }
  }

  // `joining` stand-ins join the partner of larger mass that costs least, the cheapest first, all at once.
  void join(int joining, bool again) {
    // By mass, the largest first, of equal ones the earlier; those that are gone come last.
    for (int a = 0; a < used; a++) keys[a] = uint64_t(alive[a] ? ~ascending(log_mass[a]) : ~0u) << 32 | a;
    std::sort(keys.begin(), keys.begin() + used);
    std::fill(rank.begin(), rank.end(), most);
    for (int i = 0; i < used; i++) rank[uint32_t(keys[i])] = i;
    const float top = log_mass[uint32_t(keys[0])];
    for (int a = 0; a < used; a += LANES)
      store(&lightness[a], inverse(exponential(larger(load(&log_mass[a]) - top, all(p.lowest)))));
    for (int a = 0; a < used; a += LANES) seek(a);
    for (int a = 0; a < used; a++) keys[a] = uint64_t(alive[a] ? ascending(least[a]) : ~0u) << 32 | a;
    std::nth_element(keys.begin(), keys.begin() + joining, keys.begin() + used);
    for (int i = 0; i < joining; i++) order[i] = uint32_t(keys[i]);
    std::sort(order.begin(), order.begin() + joining);
    std::fill(total.begin(), total.end(), 1.0f);
    for (int i = 0; i < joining; i++) alive[order[i]] = 0;
    std::vector<int> leaders;
    std::vector<float> shares;
    for (int i = 0; i < joining; i++) {
      const int a = order[i];
      int leader = partner[a];
      while (!alive[leader]) leader = partner[leader];
      const float share = std::exp(log_mass[a] - log_mass[leader]);
      for (int d = 0; d < wide; d++) rows[leader * wide + d] += share * rows[a * wide + d];
      total[leader] += share;
      size[leader] += size[a];
      merged[leader] = 1;
      leaders.push_back(leader);
      shares.push_back(share);
    }
    if (again) join_products(joining, leaders, shares);
    for (int a = 0; a < used; a++) {
      if (total[a] == 1.0f) continue;
      for (int d = 0; d < wide; d++) rows[a * wide + d] /= total[a];
      log_mass[a] += std::log(total[a]);
    }
  }

  // The bits of x in an order that is that of the numbers.
  static uint32_t ascending(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  }

  // 1 / x for x between 1e-3 and 1e5, to float32's rounding: Newton's steps are faster than the division.
  static vec inverse(vec x) {
    vec found = (vec)(ivec{} + 0x7ef311c3 - (ivec)x);
    for (int i = 0; i < 3; i++) found *= 2.0f - x * found;
    return found;
  }

  // The cheapest partner of the stand-ins a, a + 1, .. in lanes: of those of larger mass, of equal costs, the first.
  void seek(int a) {
    ivec own;
    memcpy(&own, &rank[a], sizeof own);
    const vec mine = load(&square[a]), light = load(&lightness[a]);
    vec best = all(INFINITY);
    ivec whose = count_up() + a;
    for (int b = 0; b < used; b++) {
      const vec apart = larger(mine + square[b] - 2.0f * load(&gram[b * pitch + a]), vec{});
      const vec cost = apart * inverse(light + lightness[b]);
      const ivec closer = (cost < best) & (rank[b] < own);
      best = closer ? cost : best;
      whose = closer ? ivec{} + b : whose;
    }
    store(&least[a], best);
    memcpy(&partner[a], &whose, sizeof whose);
  }

  // The Gram matrix follows the rows: joining is linear.
  void join_products(int joining, const std::vector<int> &leaders, const std::vector<float> &shares) {
    for (int i = 0; i < joining; i++)
      for (int b = 0; b < used; b++) gram[leaders[i] * pitch + b] += shares[i] * gram[order[i] * pitch + b];
    // Those that were joined, each once.
    std::vector<int> met;
    for (int a = 0; a < used; a++)
      if (total[a] != 1.0f) met.push_back(a);
    for (int a : met)
      for (int b = 0; b < used; b++) gram[a * pitch + b] /= total[a];
    for (int a = 0; a < used; a++) {
      if (!alive[a]) continue;
      float *row = &gram[a * pitch];
      for (int i = 0; i < joining; i++) row[leaders[i]] += shares[i] * row[order[i]];
      for (int b : met) row[b] /= total[b];
      square[a] = row[a];
    }
  }

  // Those that are left move to the front; who met somebody gets the excess that keeps its mass.
  void settle() {
    int kept = 0;
    for (int a = 0; a < used; a++) {
      if (!alive[a]) continue;
      float *row = &rows[kept * wide];
      if (kept != a) std::copy(&rows[a * wide], &rows[(a + 1) * wide], row);
      excess[kept] = merged[a] ? log_mass[a] - log_weight_of(row) : excess[a];
      size[kept++] = size[a];
    }
    used = kept;
  }

  float log_weight_of(const float *row) {
    float along = 0.0f, energy = 0.0f;
    float *x = on_query.data(), *y = x + dim;
    for (int d = 0; d < dim; d++) {
      x[d] = row[d] - mean[d];
      y[d] = 0.0f;
    }
    for (int d = 0; d < dim; d++) {
      along += x[d] * mean_query[d];
      for (int e = 0; e < dim; e++) y[e] += x[d] * form[d * dim + e];
    }
    for (int d = 0; d < dim; d++) energy += x[d] * y[d];
    return log_weight(along, energy);
  }

  void write(float *to_rows, float *to_excess, float *to_size, int64_t place) const {
    float *into = to_rows + place * p.count * wide;
    std::copy(rows.begin(), rows.begin() + used * wide, into);
    std::fill(into + used * wide, into + p.count * wide, 0.0f);
    for (int64_t c = 0; c < p.count; c++) {
      to_excess[place * p.count + c] = c < used ? excess[c] : -INFINITY;
      to_size[place * p.count + c] = c < used ? size[c] : 0.0f;
    }
  }
};

template <class Q, class T>
static void walk(const Past &p, int threads) {
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
  for (int64_t head = 0; head < p.batch * p.heads; head++) Walker(p, head).walk<Q, T>();
}

extern "C" void fewkeys_walk(const Past *p, int is_bf16, int query_is_bf16, int threads) {
  if (query_is_bf16)
    is_bf16 ? walk<bf16, bf16>(*p, threads) : walk<bf16, float>(*p, threads);
  else
    is_bf16 ? walk<float, bf16>(*p, threads) : walk<float, float>(*p, threads);
}
