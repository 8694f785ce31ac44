// A driver of CUDA without a GPU: pages of a device are files in memory, which are mapped as the real ones are.

#define _GNU_SOURCE
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { INVALID_VALUE = 1, OUT_OF_MEMORY = 2, PAGE = 2 << 20 };

static size_t used, limit = (size_t)1 << 40, largest_copy = (size_t)1 << 40;
static int pinned;

size_t fake_used(void) { return used; }
int fake_pinned(void) { return pinned; }
void fake_limit(size_t bytes) { limit = bytes; }
void fake_largest_copy(size_t bytes) { largest_copy = bytes; }

static void *nothing(void *at, size_t size, int fixed) {
    return mmap(at, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | fixed, -1, 0);
}

int cuMemAddressReserve(uint64_t *address, size_t size, size_t align, uint64_t wanted, uint64_t flags) {
    (void)align, (void)wanted, (void)flags;
    if (size % PAGE) return INVALID_VALUE;
    *address = (uint64_t)nothing(NULL, size, 0);
    return 0;
}
int cuMemAddressFree(uint64_t address, size_t size) { return munmap((void *)address, size); }
int cuMemCreate(uint64_t *pages, size_t size, const void *allocation, uint64_t flags) {
    (void)allocation, (void)flags;
    if (size % PAGE) return INVALID_VALUE;
    if (used + size > limit) return OUT_OF_MEMORY;
    int file = memfd_create("pages", 0);
    if (ftruncate(file, size)) return INVALID_VALUE;
    used += size;
    *pages = file;
    return 0;
}
int cuMemRelease(uint64_t pages) { return close(pages); }
int cuMemMap(uint64_t address, size_t size, size_t offset, uint64_t pages, uint64_t flags) {
    (void)flags;
    return mmap((void *)address, size, PROT_NONE, MAP_SHARED | MAP_FIXED, pages, offset) == MAP_FAILED;
}
int cuMemSetAccess(uint64_t address, size_t size, const void *access, size_t count) {
    (void)access, (void)count;
    return mprotect((void *)address, size, PROT_READ | PROT_WRITE);
}
int cuMemUnmap(uint64_t address, size_t size) {
    used -= size;
    return nothing((void *)address, size, MAP_FIXED) == MAP_FAILED;
}
int cuMemGetAllocationGranularity(size_t *page, const void *allocation, int option) {
    (void)allocation, (void)option;
    *page = PAGE;
    return 0;
}
static int copy(void *into, const void *from, size_t size) {
    if (size > largest_copy) return INVALID_VALUE;
    memcpy(into, from, size);
    return 0;
}
int cuMemcpyDtoH_v2(void *host, uint64_t address, size_t size) { return copy(host, (void *)address, size); }
int cuMemcpyHtoD_v2(uint64_t address, const void *host, size_t size) { return copy((void *)address, host, size); }
int cuMemHostRegister_v2(void *host, size_t size, unsigned flags) { return (void)host, (void)size, (void)flags, pinned++, 0; }
int cuMemHostUnregister(void *host) { return (void)host, pinned--, 0; }
int cuThreadExchangeStreamCaptureMode(int *mode) { return (void)mode, 0; }
int cuCtxSynchronize(void) { return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) { return (void)attribute, (void)device, *value = 1, 0; }
int cuGetErrorString(int error, const char **message) { return (void)error, *message = "invalid value", 0; }
