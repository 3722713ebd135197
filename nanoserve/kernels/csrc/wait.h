/* Sleeping on a 32-bit word until it changes: a futex where there is one, a condition variable elsewhere. */
#ifndef NS_WAIT_H
#define NS_WAIT_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>

#ifdef __linux__
#include <limits.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

typedef struct {
    _Alignas(64) _Atomic uint32_t value;
    _Atomic uint32_t sleepers;
#ifndef __linux__
    pthread_mutex_t mutex;
    pthread_cond_t changed;
#endif
} ns_word;

static inline void ns_relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static inline void ns_word_init(ns_word *word)
{
    atomic_init(&word->value, 0);
    atomic_init(&word->sleepers, 0);
#ifndef __linux__
    pthread_mutex_init(&word->mutex, NULL);
    pthread_cond_init(&word->changed, NULL);
#endif
}

static inline uint32_t ns_word_get(ns_word *word) { return atomic_load_explicit(&word->value, memory_order_acquire); }

static inline void ns_word_wake(ns_word *word)
{
#ifdef __linux__
    if (atomic_load(&word->sleepers)) syscall(SYS_futex, &word->value, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
#else
    pthread_mutex_lock(&word->mutex); /* so that a sleeper is either before its look at the value, or asleep */
    pthread_cond_broadcast(&word->changed);
    pthread_mutex_unlock(&word->mutex);
#endif
}

/* Publishes a new value and wakes whoever sleeps. */
static inline void ns_word_set(ns_word *word, uint32_t value)
{
    atomic_store(&word->value, value);
    ns_word_wake(word);
}

/* The same with the next value, from any number of threads at once. */
static inline void ns_word_bump(ns_word *word)
{
    atomic_fetch_add(&word->value, 1);
    ns_word_wake(word);
}

/* Returns once the value is not `old`, after `spins` looks without a system call. */
static inline void ns_word_wait(ns_word *word, uint32_t old, int spins)
{
    for (int i = 0; i < spins; i++) {
        if (ns_word_get(word) != old) return;
        ns_relax();
    }
    atomic_fetch_add(&word->sleepers, 1);
#ifdef __linux__
    while (atomic_load(&word->value) == old) syscall(SYS_futex, &word->value, FUTEX_WAIT_PRIVATE, old, NULL, NULL, 0);
#else
    pthread_mutex_lock(&word->mutex);
    while (atomic_load(&word->value) == old) pthread_cond_wait(&word->changed, &word->mutex);
    pthread_mutex_unlock(&word->mutex);
#endif
    atomic_fetch_sub(&word->sleepers, 1);
}

#endif
