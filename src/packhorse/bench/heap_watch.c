/* Counts the bytes of live memory of one process, and the most there were: preload it (packhorse.bench.heap_watch does).
 *
 * Two counts in one. What malloc and its relatives have handed out, by malloc's own word of how much that is. And anonymous mappings of at least
 * 2 MiB that the program asks the system for by itself: packhorse's arena and long runs are such. Those of malloc are not seen a second time, since
 * inside the C library calls do not come by here; nor are Python's own arenas, which are smaller; nor files.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <malloc.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#define LEAST_MAPPING ((size_t)2 << 20)
#define MOST_MAPPINGS 65536
#define PAGES_AT_ONCE 65536

void *__libc_malloc(size_t);
void *__libc_calloc(size_t, size_t);
void *__libc_realloc(void *, size_t);
void *__libc_memalign(size_t, size_t);
void __libc_free(void *);

static atomic_long now, most;

static void grow(long bytes) {
    long after = atomic_fetch_add(&now, bytes) + bytes;
    long seen = atomic_load(&most);
    while (after > seen && !atomic_compare_exchange_weak(&most, &seen, after))
        ;
}

static long size_of(void *block) { return block == NULL ? 0 : (long)malloc_usable_size(block); }

static void *given(void *block) {
    grow(size_of(block));
    return block;
}

void *malloc(size_t bytes) { return given(__libc_malloc(bytes)); }
void *calloc(size_t count, size_t bytes) { return given(__libc_calloc(count, bytes)); }
void *memalign(size_t alignment, size_t bytes) { return given(__libc_memalign(alignment, bytes)); }
void *aligned_alloc(size_t alignment, size_t bytes) { return given(__libc_memalign(alignment, bytes)); }

void free(void *block) {
    atomic_fetch_sub(&now, size_of(block));
    __libc_free(block);
}

void *realloc(void *block, size_t bytes) {
    long before = size_of(block);
    void *moved = __libc_realloc(block, bytes);
    if (moved != NULL || bytes == 0) {
        atomic_fetch_sub(&now, before);
        grow(size_of(moved));
    }
    return moved;
}

int posix_memalign(void **result, size_t alignment, size_t bytes) {
    if (alignment % sizeof(void *) != 0 || alignment == 0 || (alignment & (alignment - 1)) != 0)
        return EINVAL;
    void *block = __libc_memalign(alignment, bytes);
    if (block == NULL)
        return ENOMEM;
    *result = given(block);
    return 0;
}

/* -- mappings -- */

static struct {
    char *start;
    size_t bytes;
} mapped[MOST_MAPPINGS];
static size_t num_mapped;
static pthread_mutex_t guard = PTHREAD_MUTEX_INITIALIZER;

void *mmap(void *wish, size_t bytes, int protection, int flags, int file, off_t offset) {
    void *start = (void *)syscall(SYS_mmap, wish, bytes, protection, flags, file, offset);
    int anonymous = (flags & MAP_ANONYMOUS) && (protection & PROT_WRITE) && !(flags & (MAP_FIXED | MAP_NORESERVE));
    if (start == MAP_FAILED || !anonymous || bytes < LEAST_MAPPING)
        return start;
    pthread_mutex_lock(&guard);
    if (num_mapped < MOST_MAPPINGS) {
        mapped[num_mapped].start = start;
        mapped[num_mapped++].bytes = bytes;
        grow((long)bytes);
    }
    pthread_mutex_unlock(&guard);
    return start;
}

void *mmap64(void *wish, size_t bytes, int protection, int flags, int file, off_t offset) {
    return mmap(wish, bytes, protection, flags, file, offset);
}

int munmap(void *start, size_t bytes) {
    pthread_mutex_lock(&guard);
    for (size_t i = 0; i < num_mapped; i++)
        if (mapped[i].start == start) {
            atomic_fetch_sub(&now, (long)mapped[i].bytes);
            mapped[i] = mapped[--num_mapped];
            break;
        }
    pthread_mutex_unlock(&guard);
    return (int)syscall(SYS_munmap, start, bytes);
}

/* -- what packhorse.bench.heap_watch asks -- */

long heap_watch_now(void) { return atomic_load(&now); }
long heap_watch_most(void) { return atomic_load(&most); }
void heap_watch_again(void) { atomic_store(&most, atomic_load(&now)); }

/* Bytes of the mappings that nothing has touched so far, so that they take no memory. */
long heap_watch_untouched(void) {
    static unsigned char there[PAGES_AT_ONCE];
    long page = sysconf(_SC_PAGESIZE), untouched = 0;
    pthread_mutex_lock(&guard);
    for (size_t i = 0; i < num_mapped; i++)
        for (size_t at = 0; at < mapped[i].bytes; at += PAGES_AT_ONCE * page) {
            size_t left = mapped[i].bytes - at, bytes = left < PAGES_AT_ONCE * (size_t)page ? left : PAGES_AT_ONCE * (size_t)page;
            if (mincore(mapped[i].start + at, bytes, there) == 0)
                for (size_t k = 0; k < (bytes + page - 1) / page; k++)
                    untouched += there[k] & 1 ? 0 : page;
        }
    pthread_mutex_unlock(&guard);
    return untouched;
}
