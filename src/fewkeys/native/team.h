// Work on several threads. No exception leaves a thread: an error ends the work of all, and the caller gets a code.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <ctime>
#include <functional>
#include <new>
#include <thread>
#include <vector>

namespace fewkeys {

// How a kernel ends. INDEFINITE: a matrix has no Cholesky factor; LARGE: a number exceeds the limit.
enum Outcome : int { DONE, OUT_OF_MEMORY, FAILED, INDEFINITE, LARGE };
struct Failure { Outcome outcome; };  // what kernels throw

constexpr int MOST_THREADS = 256;

static inline int64_t divide_up(int64_t count, int64_t by) { return (count + by - 1) / by; }

// The entry point of torch's OpenMP, which `build.py` looks up: no second set of threads competes for the cores.
typedef void (*OpenMp)(void (*)(void *), void *, unsigned, unsigned);
inline OpenMp open_mp = nullptr;

// Marks a function that must not be cloned or inlined: clones could round differently, so that results would depend on
// the number of threads.
#ifdef __clang__
#define ONE_COPY __attribute__((noinline))
#else
#define ONE_COPY __attribute__((noipa))
#endif

template <class Work>
ONE_COPY static void begin(void *work) {
  (*(Work *)work)();
}

// Runs `work`, which must not throw, on `count` threads, one of them the caller's, or on as many as there are.
template <class Work>
static void on_threads(int count, Work work) {
  if (open_mp) return open_mp(begin<Work>, &work, count, 0);
  std::vector<std::thread> others;
  try {
    for (int i = 1; i < count; i++) others.emplace_back(begin<Work>, &work);
  } catch (...) {
  }
  begin<Work>(&work);
  for (std::thread &other : others) other.join();
}

// How `run` ends.
template <class Run>
static Outcome outcome_of(Run run) noexcept {
  try {
    run();
  } catch (Failure failure) {
    return failure.outcome;
  } catch (const std::bad_alloc &) {
    return OUT_OF_MEMORY;
  } catch (...) {
    return FAILED;
  }
  return DONE;
}

class Team {
 public:
  // Throws if a thread has failed.
  void check() const {
    if (outcome != DONE) throw Failure{outcome};
  }

  // Runs `work`; called on every thread of the team.
  template <class Run>
  void run(Run work) {
    if (const Outcome ended = outcome_of(work)) outcome = ended;
  }

 private:
  std::atomic<Outcome> outcome{DONE};
};

// Raises a number to at least `to`.
template <class T>
static void raise_to(std::atomic<T> &number, T to) {
  for (T before = number; before < to && !number.compare_exchange_weak(before, to);) {}
}

static inline int team_size(int threads) { return std::clamp(threads, 1, MOST_THREADS); }

// A delay in nanoseconds that halves every HALF_LIFE, so that threads are tried again.
class Fading {
 public:
  int64_t at(int64_t now) const {
    const int64_t halvings = (now - when) / HALF_LIFE;
    return halvings < 62 ? late >> halvings : 0;
  }
  void set(int64_t to, int64_t now) { late = to, when = now; }

 private:
  static constexpr int64_t HALF_LIFE = 200'000'000;
  int64_t late = 0, when = 0;
};

// How late the other threads start, in nanoseconds, where they were late twice in a row: another process may use their
// core. The caller first works alone for as long as they are expected to be late: at most twice the time of the better
// choice. A single late start says nothing, and neither does one after a pause, when threads have to be woken
// (docs/processors.md). Without this, calls on two cores took twice as long on average beside one busy process.
class Lateness {
 public:
  static int64_t now() { return read(CLOCK_MONOTONIC); }
  // The processor time of this thread.
  static int64_t worked() { return read(CLOCK_THREAD_CPUTIME_ID); }
  // The expected delay: none if it is less than LEAST, which waking a sleeping thread may take.
  static int64_t expected(int64_t now) {
    const int64_t late = repeated.at(now);
    return late < LEAST ? 0 : late;
  }
  // After work for which the threads were called at `called`, and the last one started at `started`.
  static void note(int64_t called, int64_t started) {
    const int64_t late = started - called, pause = called - finished;
    finished = now();
    if (late < LEAST || pause > AWAKE) return;
    const int64_t again = std::min(late, last.at(started));
    if (again >= expected(started)) repeated.set(again, started);
    last.set(late, started);
  }

 private:
  static constexpr int64_t LEAST = 500'000, AWAKE = 2'000'000;
  // Of each caller, which has threads of its own.
  static inline thread_local Fading last, repeated;
  static inline thread_local int64_t finished = 0;
  static int64_t read(clockid_t clock) {
    timespec time;
    clock_gettime(clock, &time);
    return time.tv_sec * 1'000'000'000 + time.tv_nsec;
  }
};

// Takes pieces on one thread, `batch` at once, until the thread's processor time is `until`; 0: no limit.
template <class NewWorker, class Run>
ONE_COPY static void take_pieces(const Team &team, std::atomic<int64_t> &next, int64_t pieces, int64_t batch,
                                 int64_t until, NewWorker &new_worker, Run &run) {
  auto worker = new_worker();
  for (int64_t first; (!until || Lateness::worked() < until) && (first = next.fetch_add(batch)) < pieces;)
    for (int64_t piece = first; piece < std::min(pieces, first + batch); piece++) {
      team.check();
      std::invoke(run, worker, piece);
    }
}

// Calls `run(worker, piece)` for all pieces. Threads take them in ascending order, `batch` at once; each has one
// worker.
template <class NewWorker, class Run>
static void in_parallel(int threads, int64_t pieces, NewWorker new_worker, Run run, int64_t batch = 1) {
  Team team;
  std::atomic<int64_t> next{0};
  const auto take = [&](int64_t until) {
    team.run([&] { take_pieces(team, next, pieces, batch, until, new_worker, run); });
  };
  // Not more threads than batches: waking a thread for nothing costs more than a small call.
  const int size = team_size(std::min<int64_t>(threads, divide_up(pieces, batch)));
  if (size == 1) {
    take(0);
    return team.check();
  }
  int64_t called = Lateness::now();
  if (const int64_t late = Lateness::expected(called)) {
    take(Lateness::worked() + late);
    team.check();
    if (next >= pieces) return;
    called = Lateness::now();
  }
  std::atomic<int64_t> last{called};
  on_threads(size, [&] {
    raise_to(last, Lateness::now());
    take(0);
  });
  Lateness::note(called, last);
  team.check();
}

// A step of the work on every head: `run(worker, head, piece)` for its pieces, in any order.
template <class Run>
struct Phase {
  int64_t pieces;
  Run run;
  Phase(int64_t pieces, Run run) : pieces(pieces), run(run) {}
};

// Runs phases one after the other. If heads are `small` and there are enough for all threads, each thread takes all
// phases of a head: starting all threads costs as much as several such heads. Otherwise all threads share every phase.
template <class NewWorker, class... Phases>
static void in_phases(int threads, int64_t heads, bool small, NewWorker new_worker, Phases... phases) {
  if (small && heads >= team_size(threads))
    return in_parallel(threads, heads, new_worker, [&](auto &worker, int64_t head) {
      const auto run = [&](auto &phase) {
        for (int64_t i = 0; i < phase.pieces; i++) std::invoke(phase.run, worker, head, i);
      };
      (run(phases), ...);
    });
  const auto share = [&](auto &phase) {
    in_parallel(threads, heads * phase.pieces, new_worker,
                [&](auto &worker, int64_t i) { std::invoke(phase.run, worker, i / phase.pieces, i % phase.pieces); });
  };
  (share(phases), ...);
}

}  // namespace fewkeys
