/* Replays images of launches (image.py) for the sanitizers to watch.
 *
 *   driver FILE...   exits 0 if every launch ends, and ends alike record by record and whole, on one thread and three
 *
 * Record by record, all memory of the image but what the running record may touch is poisoned, so that an access is
 * out of bounds even where something else lies. The whole launch then runs as a server runs it.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "pool.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#define POISON(at, bytes) __asan_poison_memory_region(at, bytes)
#define UNPOISON(at, bytes) __asan_unpoison_memory_region(at, bytes)
#else
#define POISON(at, bytes) (void)(at)
#define UNPOISON(at, bytes) (void)(at)
#endif

enum { LINE = 64 };

/* Memory from `address` on, where the image was taken; here it lies at `data`, equally aligned. */
typedef struct {
    int64_t address, bytes, stored;
    const uint8_t *content;
    uint8_t *block, *data;
} region;

typedef struct {
    int64_t address, bytes;
} extent;

typedef struct {
    region *regions;
    ns_record *records;
    const extent **extents;
    int64_t *extent_counts;
    int64_t region_count, record_count, scratch_bytes, sum;
    uint8_t nowhere[LINE]; /* what pointers at nothing a record may touch are set to */
    uint8_t *file;
} image;

static void *get(size_t bytes)
{
    void *made = NULL;
    if (posix_memalign(&made, LINE, bytes + LINE)) abort();
    return made;
}

static uint8_t *here(image *i, int64_t address)
{
    for (int64_t r = 0; r < i->region_count; r++) {
        const region *each = &i->regions[r];
        if (address >= each->address && address < each->address + each->bytes) return each->data + (address - each->address);
    }
    return i->nowhere;
}

static const uint8_t *take(const uint8_t **at, size_t bytes)
{
    const uint8_t *start = *at;
    *at += bytes;
    return start;
}

static int load(image *i, const char *path)
{
    FILE *stream = fopen(path, "rb");
    if (!stream || fseek(stream, 0, SEEK_END)) return 1;
    const long size = ftell(stream);
    i->file = get((size_t)size);
    rewind(stream);
    if (fread(i->file, 1, (size_t)size, stream) != (size_t)size || fclose(stream)) return 1;
    const uint8_t *at = i->file;
    int64_t counts[4];
    memcpy(counts, take(&at, sizeof counts), sizeof counts);
    if (counts[2] != (int64_t)sizeof(ns_record)) return 1;
    i->region_count = counts[0];
    i->record_count = counts[1];
    i->scratch_bytes = counts[3];
    i->regions = get((size_t)counts[0] * sizeof *i->regions);
    i->records = get((size_t)counts[1] * sizeof *i->records);
    i->extents = get((size_t)counts[1] * sizeof *i->extents);
    i->extent_counts = get((size_t)counts[1] * sizeof *i->extent_counts);
    for (int64_t r = 0; r < i->region_count; r++) {
        region *each = &i->regions[r];
        memcpy(each, take(&at, 24), 24);
        each->content = each->stored ? take(&at, (size_t)each->bytes) : NULL;
        each->block = get((size_t)each->bytes + LINE);
        each->data = each->block + each->address % LINE;
    }
    for (int64_t r = 0; r < i->record_count; r++) {
        int64_t sizes[2], offset, address;
        memcpy(&i->records[r], take(&at, sizeof(ns_record)), sizeof(ns_record));
        memcpy(sizes, take(&at, sizeof sizes), sizeof sizes);
        for (int64_t p = 0; p < sizes[0]; p++) {
            memcpy(&offset, take(&at, sizeof offset), sizeof offset);
            memcpy(&address, (uint8_t *)&i->records[r] + offset, sizeof address);
            uint8_t *moved = here(i, address);
            memcpy((uint8_t *)&i->records[r] + offset, &moved, sizeof moved);
        }
        extent *extents = get((size_t)sizes[1] * sizeof *extents);
        memcpy(extents, take(&at, (size_t)sizes[1] * sizeof *extents), (size_t)sizes[1] * sizeof *extents);
        i->extents[r] = extents;
        i->extent_counts[r] = sizes[1];
    }
    return at != i->file + size;
}

static void shut(image *i, int closed)
{
    for (int64_t r = 0; r < i->region_count; r++) {
        const region *each = &i->regions[r];
        POISON(each->block, (size_t)each->bytes + 2 * LINE);
        if (!closed) UNPOISON(each->data, (size_t)each->bytes);
    }
    POISON(i->nowhere, LINE);
}

static void restore(image *i)
{
    for (int64_t r = 0; r < i->region_count; r++) {
        region *each = &i->regions[r];
        UNPOISON(each->block, (size_t)each->bytes + 2 * LINE);
        if (each->stored) memcpy(each->data, each->content, (size_t)each->bytes);
        else memset(each->data, 0, (size_t)each->bytes); /* counters of attention's plan start at zero */
    }
}

/* FNV-1a over everything that was stored: scratch may differ. */
static int64_t digest(const image *i)
{
    uint64_t hash = 14695981039346656037u;
    for (int64_t r = 0; r < i->region_count; r++)
        for (int64_t b = 0; i->regions[r].stored && b < i->regions[r].bytes; b++)
            hash = (hash ^ i->regions[r].data[b]) * 1099511628211u;
    return (int64_t)hash;
}

static int launch(ns_pool *pool, const ns_record *records, int64_t count)
{
    const ns_segment segment = {records, count};
    return ns_pool_launch(pool, &segment, 1, -1) || ns_pool_wait(pool);
}

static int replay(image *i, ns_pool *pool, int whole)
{
    restore(i);
    shut(i, !whole);
    int failed = whole && launch(pool, i->records, i->record_count);
    for (int64_t r = 0; !whole && !failed && r < i->record_count; r++) {
        for (int64_t e = 0; e < i->extent_counts[r]; e++)
            UNPOISON(here(i, i->extents[r][e].address), (size_t)i->extents[r][e].bytes);
        failed = launch(pool, &i->records[r], 1);
        shut(i, 1);
    }
    shut(i, 0);
    return failed;
}

static void drop(image *i)
{
    restore(i);
    for (int64_t r = 0; r < i->region_count; r++) free(i->regions[r].block);
    for (int64_t r = 0; r < i->record_count; r++) free((void *)i->extents[r]);
    free(i->regions), free(i->records), free(i->extents), free(i->extent_counts), free(i->file);
    UNPOISON(i->nowhere, LINE);
}

int main(int argc, char **argv)
{
    for (int file = 1; file < argc; file++) {
        image *i = memset(get(sizeof *i), 0, sizeof *i);
        if (load(i, argv[file])) return printf("%s cannot be read\n", argv[file]), 2;
        for (int run = 0; run < 4; run++) {
            ns_pool *pool = NULL;
            if (ns_pool_new(1 + run / 2 * 2, &pool) || ns_pool_reserve(pool, i->scratch_bytes)) return 3;
            if (replay(i, pool, run % 2)) return printf("%s does not end\n", argv[file]), 1;
            const int64_t sum = digest(i);
            if (run && sum != i->sum) return printf("%s ends differently in run %d\n", argv[file], run), 1;
            i->sum = sum;
            ns_pool_free(pool);
        }
        drop(i);
        free(i);
    }
    return 0;
}
