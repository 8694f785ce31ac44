// Memory for a pool of torch whose pages can be given back while its addresses stay: see cuda_pool.py.
//
// torch calls pool_allocate, scratch_allocate and pool_free with its own lock held, from any thread, so nothing here may wait for Python.
// The driver is opened at run time and its types are written out: no header of CUDA is needed to compile this.

#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>

enum { SUCCESS = 0, OUT_OF_HOST_MEMORY = 2, NO_SUCH_BLOCK = 1, PINNED = 1, ON_DEVICE = 1, READ_AND_WRITE = 3, RELAXED = 2 };

typedef struct { int type, id; } Location;
typedef struct { int type, handle_types; Location location; void *win32; unsigned char flags[8]; } Allocation;
typedef struct { Location location; int flags; } Access;

static struct {
    int (*reserve)(uint64_t *, size_t, size_t, uint64_t, uint64_t);
    int (*unreserve)(uint64_t, size_t);
    int (*create)(uint64_t *, size_t, const Allocation *, uint64_t);
    int (*release)(uint64_t);
    int (*map)(uint64_t, size_t, size_t, uint64_t, uint64_t);
    int (*unmap)(uint64_t, size_t);
    int (*set_access)(uint64_t, size_t, const Access *, size_t);
    int (*synchronize)(void);
    int (*granularity)(size_t *, const Allocation *, int);
    int (*exchange_capture_mode)(int *);
} driver;

typedef struct {
    uint64_t address, size;
    int device, is_scratch, has_pages, is_unused;
} Block;

static Block *blocks;
static int count, room;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static Allocation on(int device) {
    Allocation allocation;
    memset(&allocation, 0, sizeof allocation);
    allocation.type = PINNED;
    allocation.location.type = ON_DEVICE;
    allocation.location.id = device;
    return allocation;
}

// Opens the driver. Returns 0, or 1 if there is none with these functions.
int pool_open(const char *library) {
    void *opened = dlopen(library, RTLD_NOW | RTLD_GLOBAL);
    if (opened == NULL) return 1;
    struct { void *into; const char *name; } functions[] = {
        {&driver.reserve, "cuMemAddressReserve"}, {&driver.unreserve, "cuMemAddressFree"},
        {&driver.create, "cuMemCreate"},          {&driver.release, "cuMemRelease"},
        {&driver.map, "cuMemMap"},                {&driver.unmap, "cuMemUnmap"},
        {&driver.set_access, "cuMemSetAccess"},   {&driver.synchronize, "cuCtxSynchronize"},
        {&driver.granularity, "cuMemGetAllocationGranularity"},
        {&driver.exchange_capture_mode, "cuThreadExchangeStreamCaptureMode"},
    };
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
        void *found = dlsym(opened, functions[i].name);
        if (found == NULL) return 1;
        memcpy(functions[i].into, &found, sizeof found);
    }
    return 0;
}

static int take_pages(Block *block) {
    Allocation allocation = on(block->device);
    uint64_t pages;
    int error = driver.create(&pages, block->size, &allocation, 0);
    if (error) return error;
    error = driver.map(block->address, block->size, 0, pages, 0);
    driver.release(pages);  // they stay as long as they are mapped
    if (error) return error;
    Access access = {allocation.location, READ_AND_WRITE};
    error = driver.set_access(block->address, block->size, &access, 1);
    if (error) driver.unmap(block->address, block->size);
    block->has_pages = !error;
    return error;
}

static int give_pages(Block *block) {
    int error = driver.unmap(block->address, block->size);
    if (!error) block->has_pages = 0;
    return error;
}

static Block *find(uint64_t address) {
    for (int i = 0; i < count; i++)
        if (blocks[i].address == address) return &blocks[i];
    return NULL;
}

static int add(Block block) {
    if (count == room) {
        int wanted = room ? 2 * room : 256;
        Block *larger = realloc(blocks, wanted * sizeof *blocks);
        if (larger == NULL) return OUT_OF_HOST_MEMORY;
        blocks = larger;
        room = wanted;
    }
    blocks[count++] = block;
    return SUCCESS;
}

// Returns NULL if the device has not so much memory: then torch frees what it has cached, and tries again.
static void *allocate(ssize_t size, int device, int is_scratch) {
    Allocation allocation = on(device);
    size_t page;
    Block block = {0, 0, device, is_scratch, 0, 0};
    if (driver.granularity(&page, &allocation, 0)) return NULL;
    block.size = (size + page - 1) / page * page;
    if (driver.reserve(&block.address, block.size, 0, 0, 0)) return NULL;
    pthread_mutex_lock(&lock);
    int error = take_pages(&block) || add(block);
    pthread_mutex_unlock(&lock);
    if (!error) return (void *)block.address;
    if (block.has_pages) give_pages(&block);
    driver.unreserve(block.address, block.size);
    return NULL;
}

// Of memory whose content is lost when it is given back.
void *scratch_allocate(ssize_t size, int device, void *stream) {
    (void)stream;
    int mode = RELAXED;  // a graph is being captured, and this is no part of it
    driver.exchange_capture_mode(&mode);
    void *address = allocate(size, device, 1);
    driver.exchange_capture_mode(&mode);
    return address;
}

void *pool_allocate(ssize_t size, int device, void *stream) {
    (void)stream;
    return allocate(size, device, 0);
}

void pool_free(void *address, ssize_t size, int device, void *stream) {
    (void)size, (void)device, (void)stream;
    pthread_mutex_lock(&lock);
    Block *block = find((uint64_t)address);
    if (block != NULL) {
        driver.synchronize();  // as cudaFree: what was launched may use the memory
        if (block->has_pages) give_pages(block);
        driver.unreserve(block->address, block->size);
        *block = blocks[--count];
    }
    pthread_mutex_unlock(&lock);
}

// Writes the blocks that are in use, at most ``limit`` of them, and returns how many there are.
int pool_blocks(uint64_t *addresses, uint64_t *sizes, uint8_t *are_scratch, int limit) {
    int used = 0;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < count; i++) {
        if (blocks[i].is_unused) continue;
        if (used < limit) {
            addresses[used] = blocks[i].address;
            sizes[used] = blocks[i].size;
            are_scratch[used] = blocks[i].is_scratch;
        }
        used++;
    }
    pthread_mutex_unlock(&lock);
    return used;
}

static int change(uint64_t address, int takes) {
    pthread_mutex_lock(&lock);
    Block *block = find(address);
    int error = block == NULL ? NO_SUCH_BLOCK : SUCCESS;
    if (block != NULL && block->has_pages != takes) error = takes ? take_pages(block) : give_pages(block);
    pthread_mutex_unlock(&lock);
    return error;
}

// Both return the driver's result, and do nothing if it is so already.
int pool_unmap(uint64_t address) { return change(address, 0); }
int pool_map(uint64_t address) { return change(address, 1); }

// No tensor is in this block, and none will be: it needs no pages any more.
int pool_drop(uint64_t address) {
    int error = change(address, 0);
    pthread_mutex_lock(&lock);
    Block *block = find(address);
    if (block != NULL) block->is_unused = 1;
    pthread_mutex_unlock(&lock);
    return error;
}
