// What the library exports: every kernel, and what its loader calls. One translation unit, so that the products that
// all kernels share are compiled once.
#include "cohort_means.h"
#include "cohorts.h"
#include "extent.h"
#include "frame.h"
#include "keys.h"
#include "lloyd.h"
#include "near_cohorts.h"
#include "scan_attend.h"
#include "tilts.h"

namespace fewkeys {

// The exports: `fewkeys_name(arguments, threads)`; kernels of float32 or bfloat16 take the kind before the threads.
#define EXPORT(name, Args) \
  FEWKEYS_EXPORT int fewkeys_##name(const Args *p, int threads) { \
    return outcome_of([=] { name(*p, threads); }); \
  }
#define EXPORT_BY_DTYPE(name, Args) \
  FEWKEYS_EXPORT int fewkeys_##name(const Args *p, int is_bf16, int threads) { \
    return outcome_of([=] { is_bf16 ? name<bf16>(*p, threads) : name<float>(*p, threads); }); \
  }

EXPORT_BY_DTYPE(attend, Near)
EXPORT_BY_DTYPE(extents, Extents)
EXPORT_BY_DTYPE(frame, Framed)
EXPORT_BY_DTYPE(cluster, Clustered)
EXPORT_BY_DTYPE(best, Best)
EXPORT_BY_DTYPE(tilt, Tilts)
EXPORT_BY_DTYPE(scan_attend, ScanAttend)
EXPORT_BY_DTYPE(scan_codes, Scan)
EXPORT_BY_DTYPE(code_keys, Coding)
EXPORT(cohort_means, StandIns)
EXPORT(halve, Halves)

// The instruction set that this library was compiled for, as `sets.py` names it.
FEWKEYS_EXPORT const char *fewkeys_set() { return FEWKEYS_SET; }

// The entry of the OpenMP whose threads the kernels run on.
FEWKEYS_EXPORT void fewkeys_lend(OpenMp entry) { open_mp = entry; }

#ifdef FEWKEYS_COUNT
// The counts since the last call.
FEWKEYS_EXPORT void fewkeys_take_counters(int64_t *adds, int64_t *bytes) {
  *adds = multiply_adds.exchange(0), *bytes = bytes_taken.exchange(0);
}

// Lets the allocation of this number, counted from now, fail; 0: none.
FEWKEYS_EXPORT void fewkeys_fail_at(int64_t number) { until_failure = number; }
#endif

}  // namespace fewkeys
