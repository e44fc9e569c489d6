/* A reader like runsc's, without an interpreter's costs: SLOTS threads, each taking the next range in ascending order.
 *
 *     slots sequential FILE SLOTS READ_BYTES        the whole file once
 *     slots random     FILE COUNT  READ_BYTES       COUNT reads at random aligned offsets, one after another
 *
 * Prints JSON: bytes, seconds, and for `random` the latencies' percentiles in microseconds. gVisor's loader does the
 * same with 128 goroutines of pread64, 256 KiB each (pkg/sentry/state/stateio/pagesfile.go).
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static int fd;
static off_t size;
static size_t read_bytes;
static _Atomic off_t next_offset;

static double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec / 1e9;
}

static void read_exactly(char *buffer, size_t count, off_t offset) {
    while (count > 0) {
        ssize_t got = pread(fd, buffer, count, offset);
        if (got <= 0) {
            fprintf(stderr, "read at %lld: %s\n", (long long)offset, got ? strerror(errno) : "end of file");
            exit(1);
        }
        buffer += got, count -= (size_t)got, offset += got;
    }
}

static void *slot(void *unused) {
    (void)unused;
    char *buffer = aligned_alloc(4096, read_bytes);
    for (;;) {
        off_t offset = next_offset;
        while (!__atomic_compare_exchange_n((off_t *)&next_offset, &offset, offset + (off_t)read_bytes, 0,
                                            __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
        }
        if (offset >= size) break;
        size_t left = (size_t)(size - offset);
        read_exactly(buffer, left < read_bytes ? left : read_bytes, offset);
    }
    free(buffer);
    return NULL;
}

static int compare(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

int main(int argc, char **argv) {
    if (argc != 5) {
        fprintf(stderr, "usage: slots sequential|random FILE SLOTS|COUNT READ_BYTES\n");
        return 2;
    }
    int count = atoi(argv[3]);
    read_bytes = (size_t)atol(argv[4]);
    fd = open(argv[2], O_RDONLY | O_CLOEXEC);
    struct stat info;
    if (fd < 0 || fstat(fd, &info) != 0) {
        perror(argv[2]);
        return 1;
    }
    size = info.st_size;
    double began = now_s();
    if (strcmp(argv[1], "sequential") == 0) {
        pthread_t *threads = calloc((size_t)count, sizeof *threads);
        for (int i = 0; i < count; i++)
            if (pthread_create(&threads[i], NULL, slot, NULL) != 0) return 1;
        for (int i = 0; i < count; i++) pthread_join(threads[i], NULL);
        printf("{\"bytes\": %lld, \"seconds\": %.6f}\n", (long long)size, now_s() - began);
        return 0;
    }
    double *took = calloc((size_t)count, sizeof *took);
    char *buffer = aligned_alloc(4096, read_bytes);
    uint64_t state = 88172645463325252ull; /* xorshift64: the same offsets in every run */
    for (int i = 0; i < count; i++) {
        state ^= state << 13, state ^= state >> 7, state ^= state << 17;
        off_t offset = (off_t)(state % (uint64_t)(size / (off_t)read_bytes)) * (off_t)read_bytes;
        double start = now_s();
        read_exactly(buffer, read_bytes, offset);
        took[i] = (now_s() - start) * 1e6;
    }
    qsort(took, (size_t)count, sizeof *took, compare);
    printf("{\"reads\": %d, \"p50_us\": %.1f, \"p99_us\": %.1f, \"max_us\": %.1f}\n", count, took[count / 2],
           took[(size_t)count * 99 / 100], took[count - 1]);
    return 0;
}
