// What the library exports: every kernel, and what a loader asks it. One unit, so that the products that all kernels
// share are compiled once.
#include "blocks_back.h"
#include "cohorts.h"
#include "descend.h"
#include "forest.h"
#include "keys.h"
#include "lloyd.h"
#include "near_back.h"
#include "prefill.h"

namespace fewkeys {

FEWKEYS_EXPORT int fewkeys_attend(const Near *p, int is_bf16, int threads) {
  return outcome_of([=] { with_products(is_bf16, [=](auto products) { attend<decltype(products)>(*p, threads); }); });
}

FEWKEYS_EXPORT int fewkeys_attend_blocks(const Blocks *p, int is_bf16, int threads) {
  return outcome_of(
      [=] { with_products(is_bf16, [=](auto products) { attend_blocks<decltype(products)>(*p, threads); }); });
}

FEWKEYS_EXPORT int fewkeys_scan_back(const PastBack *p, int threads) {
  return outcome_of([=] { scan_back(*p, threads); });
}

FEWKEYS_EXPORT int fewkeys_scan(const Past *p, int is_bf16, int query_is_bf16, int threads) {
  return outcome_of([=] { scan(*p, is_bf16, query_is_bf16, threads); });
}

FEWKEYS_EXPORT int fewkeys_attend_back(const NearBack *p, int is_bf16, int threads) {
  return outcome_of([=] { is_bf16 ? attend_back<bf16>(*p, threads) : attend_back<float>(*p, threads); });
}

FEWKEYS_EXPORT int fewkeys_attend_blocks_back(const BlocksBack *p, int is_bf16, int threads) {
  return outcome_of([=] { is_bf16 ? attend_blocks_back<bf16>(*p, threads) : attend_blocks_back<float>(*p, threads); });
}

FEWKEYS_EXPORT int fewkeys_prefill(const Blocks *p, int is_bf16, int threads) {
  return outcome_of([=] { with_products(is_bf16, [=](auto products) { prefill<decltype(products)>(*p, threads); }); });
}

FEWKEYS_EXPORT int fewkeys_lloyd(const Lloyd *p, int is_bf16, int threads) {
  return outcome_of([=] { is_bf16 ? lloyd<bf16>(*p, threads) : lloyd<float>(*p, threads); });
}

FEWKEYS_EXPORT int fewkeys_totals(const Totals *p, int is_bf16, int threads) {
  return outcome_of([=] { is_bf16 ? totals<bf16>(*p, threads) : totals<float>(*p, threads); });
}

FEWKEYS_EXPORT int fewkeys_survey(const Survey *p, int is_bf16, int threads) {
  return outcome_of([=] { is_bf16 ? survey<bf16>(*p, threads) : survey<float>(*p, threads); });
}

FEWKEYS_EXPORT int fewkeys_label_sums(const Sums *p, int is_bf16, int threads) {
  return outcome_of([=] { is_bf16 ? label_sums<bf16>(*p, threads) : label_sums<float>(*p, threads); });
}

FEWKEYS_EXPORT int fewkeys_halve(const Halves *p, int threads) {
  return outcome_of([=] { halve(*p, threads); });
}

FEWKEYS_EXPORT int fewkeys_best(const Best *p, int is_bf16, int threads) {
  return outcome_of([=] { is_bf16 ? best<bf16>(*p, threads) : best<float>(*p, threads); });
}

FEWKEYS_EXPORT int fewkeys_tilt(const Tilts *p, int is_bf16, int threads) {
  return outcome_of([=] { is_bf16 ? tilt<bf16>(*p, threads) : tilt<float>(*p, threads); });
}

FEWKEYS_EXPORT int fewkeys_split(const Split *p, int threads) {
  return outcome_of([=] { split(*p, threads); });
}

FEWKEYS_EXPORT int fewkeys_grow(const Trees *p, int threads) {
  return outcome_of([=] { grow(*p, threads); });
}

FEWKEYS_EXPORT int fewkeys_roots(const TreeRoots *p, int threads) {
  return outcome_of([=] { roots(*p, threads); });
}

FEWKEYS_EXPORT int fewkeys_summarise(const Summaries *p, int threads) {
  return outcome_of([=] { summarise(*p, threads); });
}

FEWKEYS_EXPORT int fewkeys_descend(const Descend *p, int is_bf16, int threads) {
  return outcome_of([=] { is_bf16 ? descend<bf16>(*p, threads) : descend<float>(*p, threads); });
}

// The caller wants to know of an interrupt during its next kernel: INTERRUPTED.
FEWKEYS_EXPORT void fewkeys_watch() { Watch::next_call(); }

// What ctypes must agree on; -1 for what is no struct here.
FEWKEYS_EXPORT int64_t fewkeys_sizeof(const char *name) {
#define SIZE_OF(type) \
  if (!strcmp(name, #type)) return sizeof(type)
  SIZE_OF(Rows);
  SIZE_OF(Near);
  SIZE_OF(NearBack);
  SIZE_OF(Blocks);
  SIZE_OF(BlocksBack);
  SIZE_OF(Survey);
  SIZE_OF(Sums);
  SIZE_OF(Totals);
  SIZE_OF(Lloyd);
  SIZE_OF(Past);
  SIZE_OF(PastBack);
  SIZE_OF(Halves);
  SIZE_OF(Best);
  SIZE_OF(Tilts);
  SIZE_OF(Split);
  SIZE_OF(Trees);
  SIZE_OF(TreeRoots);
  SIZE_OF(Summaries);
  SIZE_OF(Descend);
#undef SIZE_OF
  return -1;
}

#ifdef FEWKEYS_COUNT
FEWKEYS_EXPORT void fewkeys_take_counters(int64_t *multiply_adds, int64_t *bytes) {
  Counters::all().take(*multiply_adds, *bytes);
}

// The buffer of this number, counted from now, cannot be had; 0: all can.
FEWKEYS_EXPORT void fewkeys_fail_at(int64_t number) { failing() = number; }
#endif

}  // namespace fewkeys
