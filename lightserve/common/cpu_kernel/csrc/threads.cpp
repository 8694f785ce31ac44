// Helpers spin for a short time and then sleep. The caller never waits for a helper to wake up: it takes chunks itself
// until none is left, and then waits only for chunks that a helper is computing. So a core that another process uses
// costs no more than its share, which is not so with OpenMP's fixed parts.

#include "threads.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

namespace lightserve {
namespace {

constexpr auto SPIN = std::chrono::microseconds(200);  // of a helper without work: longer than Python between two ops
constexpr int SPINS_PER_LOOK = 64;                     // at the clock
constexpr int SPINS_PER_YIELD = 4096;                  // of the caller while a helper ends its chunk

inline void relax() {
#if defined(__aarch64__)
    asm volatile("yield");
#elif defined(__x86_64__)
    asm volatile("pause");
#endif
}

struct Job {
    RangeFn fn;
    void* context;
    int64_t count;
    int64_t chunks;
};

class Pool {
public:
    explicit Pool(int helpers) {
        for (int i = 0; i < helpers; i++) std::thread([this] { help(); }).detach();
    }

    void run(const Job& job) {
        job_ = job;
        done_.store(0, std::memory_order_relaxed);
        generation_++;
        ticket_.store(generation_ << 32 | static_cast<uint64_t>(job.chunks));
        if (sleepers_.load() > 0) {
            std::lock_guard<std::mutex> lock(mutex_);
            wake_.notify_all();
        }
        while (take_chunk()) {
        }
        for (int spins = 1; done_.load(std::memory_order_acquire) < job.chunks; spins++) {
            relax();
            if (spins % SPINS_PER_YIELD == 0) std::this_thread::yield();
        }
    }

private:
    static uint64_t left(uint64_t ticket) { return ticket & 0xffffffffu; }

    // The ticket holds the number of the job and its chunks that nobody has taken. A job is replaced only after its
    // last chunk is done, so job_ is the ticket's job if the exchange succeeds.
    bool take_chunk() {
        uint64_t ticket = ticket_.load(std::memory_order_acquire);
        while (left(ticket) > 0) {
            if (ticket_.compare_exchange_weak(ticket, ticket - 1, std::memory_order_acq_rel)) {
                int64_t chunk = job_.chunks - static_cast<int64_t>(left(ticket));
                job_.fn(job_.context, chunk * job_.count / job_.chunks, (chunk + 1) * job_.count / job_.chunks);
                done_.fetch_add(1, std::memory_order_release);
                return true;
            }
        }
        return false;
    }

    [[noreturn]] void help() {
        while (true) {
            if (!take_chunk() && !spin()) sleep();
        }
    }

    bool spin() {
        auto end = std::chrono::steady_clock::now() + SPIN;
        do {
            for (int i = 0; i < SPINS_PER_LOOK; i++) {
                if (left(ticket_.load(std::memory_order_acquire)) > 0) return true;
                relax();
            }
        } while (std::chrono::steady_clock::now() < end);
        return false;
    }

    void sleep() {
        std::unique_lock<std::mutex> lock(mutex_);
        sleepers_.fetch_add(1);
        wake_.wait(lock, [this] { return left(ticket_.load()) > 0; });
        sleepers_.fetch_sub(1);
    }

    Job job_{};
    uint64_t generation_ = 0;
    std::atomic<uint64_t> ticket_{0};
    std::atomic<int64_t> done_{0};
    std::atomic<int> sleepers_{0};
    std::mutex mutex_;
    std::condition_variable wake_;
};

int threads = 1;
Pool* pool = nullptr;    // never freed: its threads end with the process
std::atomic_flag is_running = ATOMIC_FLAG_INIT;  // a loop: others, in other threads, then run alone

void forget_pool() {  // in a forked child, which has no helpers
    pool = nullptr;
    is_running.clear();
}

}  // namespace

void set_threads(int count) {
    static std::once_flag registered;
    std::call_once(registered, [] { pthread_atfork(nullptr, nullptr, forget_pool); });
    if (count != threads) {
        threads = std::max(count, 1);
        pool = nullptr;
    }
}

int num_threads() { return threads; }

void parallel_ranges(int64_t count, int64_t grain, RangeFn fn, void* context) {
    int64_t chunks = std::min<int64_t>((count + grain - 1) / grain, 0xffff);
    if (threads == 1 || chunks <= 1 || is_running.test_and_set(std::memory_order_acquire)) {
        if (count > 0) fn(context, 0, count);
        return;
    }
    if (pool == nullptr) pool = new Pool(threads - 1);
    pool->run({fn, context, count, chunks});
    is_running.clear(std::memory_order_release);
}

}  // namespace lightserve
