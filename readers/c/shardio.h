/* Reads shard sets of format version 1 (docs/format.md) on POSIX systems, without any library.

   shardio_open checks the manifest and its digest, the type, size and header of every file of one split, and the sha256
   of its tables, which it keeps in memory. shardio_read opens a file, checks it again and copies one row, whose crc32
   must be right. Both return 0, or -1 with a message in `set->error`. To read from several threads, give each thread a
   copy of the struct. Floats in the manifest are read by strtod: keep LC_NUMERIC at "C". */
#ifndef SHARDIO_H
#define SHARDIO_H

#include <fcntl.h>
#include <math.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>
#include <unistd.h>

#define SHARDIO_HEADER 4096u
#define SHARDIO_MAX_COUNT (UINT64_C(1) << 53)

/* A JSON value. Texts are canonical JSON, so strings are equal if their texts are. */
typedef struct shardio_node {
    char type; /* one of {["tfn, or i for an integer, or . for another number */
    const char *key, *text;
    size_t count;
    struct shardio_node *first, *next; /* of an object: sorted by key */
} shardio_node;

typedef struct {
    const char *name, *dtype; /* "pixels", or the name of an array; the type as in an NPY header */
    uint64_t num_sides, shape[8], row_nbytes, num_rows;
    const shardio_node *shards, *order_file, *crc32_file; /* NULL: sample i is in row i; the crc32s are in the index */
    const unsigned char *order, *crc32;
} shardio_part;

typedef struct {
    char error[300], digest[65];
    uint64_t num_samples, num_parts, key_nbytes, row_nbytes; /* of the split that is open, and of its index */
    int has_label;
    shardio_part parts[51]; /* "pixels" first, if there are any */
    uint64_t shape[3], num_classes; /* of the set: zeros if it has no pixels */
    const unsigned char *index;
    const char *folder, *at;
    const shardio_node *index_file, **files;
    size_t num_objects, num_files;
    struct shardio_block { struct shardio_block *next; size_t used, size; uint64_t bytes[]; } *memory;
} shardio_set;

#define SHARDIO_NEED(condition, ...) do { if (!(condition)) return shardio_fail(set, __VA_ARGS__); } while (0)
#define SHARDIO_TRY(call) do { if (call) return -1; } while (0)

static inline int shardio_fail(shardio_set *set, const char *format, ...) {
    va_list values;
    va_start(values, format);
    vsnprintf(set->error, sizeof set->error, format, values);
    va_end(values);
    return -1;
}

#include "shardio_json.h"

static inline uint64_t shardio_little(const unsigned char *bytes, int count) {
    uint64_t value = 0;
    while (count--) value = value << 8 | bytes[count];
    return value;
}

/* --- the manifest ------------------------------------------------------------------------------------------------- */

/* Checks the size of a file with these rows. */
static inline int shardio_sized(shardio_set *set, const shardio_node *node, uint64_t rows, uint64_t row_nbytes) {
    uint64_t nbytes = shardio_number_of(node, "nbytes");
    SHARDIO_NEED(nbytes >= SHARDIO_HEADER && (nbytes - SHARDIO_HEADER) % row_nbytes == 0 &&
                 (nbytes - SHARDIO_HEADER) / row_nbytes == rows, "manifest.json: %.200s: expected another nbytes for "
                 "%llu rows", shardio_get(node, "file")->text, (unsigned long long)rows);
    return 0;
}

/* The rows of a part: the sizes of its files, and its order. `used` has a bit for each order. */
static inline int shardio_rows(shardio_set *set, shardio_part *part, const shardio_node *node,
                               const shardio_node *orders, uint64_t *used) {
    const shardio_node *order = shardio_get(node, "order");
    part->shards = shardio_get(node, "shards");
    for (const shardio_node *shard = part->shards->first; shard; shard = shard->next) {
        SHARDIO_TRY(shardio_sized(set, shard, shardio_number_of(shard, "num_samples"), part->row_nbytes));
        part->num_rows += shardio_number_of(shard, "num_samples");
        SHARDIO_NEED(part->num_rows <= SHARDIO_MAX_COUNT, "manifest.json: %s: expected fewer rows", part->name);
    }
    SHARDIO_NEED(order || part->num_rows == set->num_samples, "manifest.json: %s: expected %llu rows, found %llu",
                 part->name, (unsigned long long)set->num_samples, (unsigned long long)part->num_rows);
    if (!order) return 0;
    uint64_t number = strtoull(order->text, NULL, 10);
    SHARDIO_NEED(orders && number < orders->count, "manifest.json: %s: expected an order of the split", part->name);
    *used |= UINT64_C(1) << number;
    for (part->order_file = orders->first; number--;) part->order_file = part->order_file->next;
    return 0;
}

static inline int shardio_array(shardio_set *set, shardio_part *part, const shardio_node *node,
                                const shardio_node *index) {
    const shardio_node *names = shardio_get(node, "names"), *columns = shardio_get(index, "columns");
    const char *name = part->name = node->key, *kind = shardio_get(node, "kind")->text;
    const uint64_t *sides = part->shape;
    part->dtype = shardio_get(node, "dtype")->text;
    part->row_nbytes = (uint64_t)(part->dtype[2] - '0');
    for (const shardio_node *side = shardio_get(node, "shape")->first; side; side = side->next) {
        SHARDIO_NEED(part->num_sides < 8 && part->row_nbytes <= SHARDIO_MAX_COUNT >> 16, "manifest.json: %s: expected "
                     "at most 8 sides, and fewer bytes", name);
        part->shape[part->num_sides++] = strtoull(side->text, NULL, 10);
        part->row_nbytes *= part->shape[part->num_sides - 1];
    }
    uint64_t num_sides = part->num_sides, height = set->shape[0], width = set->shape[1], channels = set->shape[2];
    int is_picture = (num_sides == 2 || num_sides == 3) && sides[0] == height && sides[1] == width;
    int fits = !strcmp(kind, "array") || (height && (
        !strcmp(kind, "mask") ? is_picture
        : !strcmp(kind, "boxes") ? !strcmp(part->dtype, "<f4") && num_sides == 2 && sides[1] == 5
        : !strcmp(part->dtype, "|u1") && num_sides == 3 && sides[2] == channels));
    if (!strcmp(name, "labels")) fits &= !strcmp(kind, "array") && !strcmp(part->dtype, "<f4") && num_sides <= 1 &&
                                         shardio_get(index, "label");
    SHARDIO_NEED(fits, "manifest.json: %s: expected a type and shape that fit kind and samples", name);
    for (const shardio_node *column = columns ? columns->first : NULL; column; column = column->next)
        SHARDIO_NEED(strcmp(column->first->text, name), "manifest.json: %s: expected a name of no column", name);
    SHARDIO_NEED(shardio_is_name(name, "", 64) && !shardio_is_in(name, " crc32 image images index indices key label "
                 "order pixels source_height source_width "), "manifest.json: expected another name than %.80s", name);
    SHARDIO_NEED(!names || !strcmp(kind, "boxes"), "manifest.json: %s: expected names for boxes only", name);
    return names ? shardio_distinct(set, names) : 0;
}

/* Checks a split of the manifest. `set` then describes this split. */
static inline int shardio_split(shardio_set *set, const shardio_node *split) {
    const shardio_node *index = shardio_get(split, "index"), *columns = shardio_get(index, "columns");
    const shardio_node *orders = shardio_get(split, "orders"), *arrays = shardio_get(split, "arrays");
    uint64_t used = 0;
    SHARDIO_NEED(shardio_is_name(split->key, ".-", 200), "manifest.json: expected a safe name for a split, found %.80s",
                 split->key);
    memset(set->parts, 0, sizeof set->parts);
    set->num_parts = 0;
    set->index_file = index;
    set->num_samples = shardio_number_of(split, "num_samples");
    set->key_nbytes = shardio_number_of(index, "key_nbytes");
    set->has_label = !shardio_get(index, "label");
    SHARDIO_NEED(set->key_nbytes % 8 == 4 && set->key_nbytes < 65536, "manifest.json: expected another key_nbytes");
    set->row_nbytes = 8 * (uint64_t)set->has_label + set->key_nbytes + 12 + 8 * (columns ? columns->count : 0);
    SHARDIO_NEED(!columns || columns->count <= 50, "manifest.json: expected at most 50 columns");
    for (const shardio_node *column = columns ? columns->first : NULL; column; column = column->next) {
        SHARDIO_NEED(column->count == 2 && shardio_is_name(column->first->text, "", 64) &&
                     !shardio_is_in(column->first->text, " label key source_width source_height crc32 ") &&
                     shardio_is_in(column->first->next->text, " <i8 <f8 "), "manifest.json: expected [name, type]");
        for (const shardio_node *other = columns->first; other != column; other = other->next)
            SHARDIO_NEED(strcmp(other->first->text, column->first->text), "manifest.json: expected distinct columns");
    }
    SHARDIO_TRY(shardio_sized(set, index, set->num_samples, set->row_nbytes));
    SHARDIO_NEED(!orders || orders->count <= 51, "manifest.json: expected orders that are used");
    for (const shardio_node *order = orders ? orders->first : NULL; order; order = order->next)
        SHARDIO_TRY(shardio_sized(set, order, set->num_samples, 8));
    if (set->shape[0]) {
        shardio_part *pixels = &set->parts[set->num_parts++];
        *pixels = (shardio_part){.name = "pixels", .dtype = "|u1", .num_sides = 3};
        memcpy(pixels->shape, set->shape, sizeof set->shape);
        pixels->row_nbytes = set->shape[0] * set->shape[1] * set->shape[2];
        SHARDIO_TRY(shardio_rows(set, pixels, split, orders, &used));
        SHARDIO_NEED(pixels->shards->count, "manifest.json: expected shards");
    } else {
        SHARDIO_NEED(!shardio_get(split, "shards")->count && !shardio_get(split, "order") &&
                     !shardio_get(split, "squashed"), "manifest.json: expected no shards, order or squashed");
        SHARDIO_NEED(arrays && arrays->count > (shardio_get(arrays, "labels") != NULL), "manifest.json: expected an "
                     "array besides labels");
    }
    SHARDIO_NEED(!arrays || arrays->count <= 50, "manifest.json: expected at most 50 arrays");
    for (const shardio_node *array = arrays ? arrays->first : NULL; array; array = array->next) {
        shardio_part *part = &set->parts[set->num_parts++];
        SHARDIO_TRY(shardio_array(set, part, array, index));
        SHARDIO_TRY(shardio_rows(set, part, array, orders, &used));
        SHARDIO_TRY(shardio_sized(set, part->crc32_file = shardio_get(array, "crc32"), part->num_rows, 4));
    }
    SHARDIO_NEED(used + 1 == UINT64_C(1) << (orders ? orders->count : 0), "manifest.json: expected each order to be "
                 "used");
    return 0;
}

/* The fields of a sample in the index that every index has: the key, then the size of the source and the crc32. */
static inline const unsigned char *shardio_fields(const shardio_set *set, uint64_t sample) {
    return set->index + sample * set->row_nbytes + (set->has_label ? 8 : 0);
}

/* Returns the label of a sample that exists, if `set->has_label`. */
static inline int64_t shardio_label(const shardio_set *set, uint64_t sample) {
    return (int64_t)shardio_little(set->index + sample * set->row_nbytes, 8);
}

/* --- files -------------------------------------------------------------------------------------------------------- */

/* Writes the header of a file: rows of a part, or of `descr` if there is no part. */
static inline void shardio_header(char *header, const char *descr, const shardio_part *part, uint64_t num_rows) {
    char text[SHARDIO_HEADER], type[8], sides[100] = ",", *at = sides;
    for (uint64_t i = 0; part && i < part->num_sides; i++)
        at += snprintf(at, 12, ", %u", (unsigned)part->shape[i]);
    if (part) snprintf(type, sizeof type, "'%.3s'", part->dtype);
    int length = snprintf(text, sizeof text, "{'descr': %s, 'fortran_order': False, 'shape': (%llu%s), }",
                          part ? type : descr, (unsigned long long)num_rows, sides);
    memset(header, ' ', SHARDIO_HEADER);
    memcpy(header, "\x93NUMPY\x01\x00\xf6\x0f", 10);
    memcpy(header + 10, text, (size_t)length);
    header[SHARDIO_HEADER - 1] = '\n';
}

static inline int shardio_pread(shardio_set *set, int file, const char *name, void *out, uint64_t nbytes,
                                uint64_t offset) {
    for (uint64_t done = 0; done < nbytes;) {
        ssize_t count = pread(file, (char *)out + done, nbytes - done, (off_t)(offset + done));
        SHARDIO_NEED(count > 0, "%.200s: expected %llu bytes at %llu", name, (unsigned long long)nbytes,
                     (unsigned long long)offset);
        done += (uint64_t)count;
    }
    return 0;
}

/* Opens a file of the set and checks its type, its size (of manifest.json: at most `nbytes`) and its header. */
static inline int shardio_open_file(shardio_set *set, const char *name, uint64_t nbytes, const char *header) {
    char path[4096], found[SHARDIO_HEADER];
    struct stat status;
    int length = snprintf(path, sizeof path, "%s/%s", set->folder, name);
    int file = length < (int)sizeof path ? open(path, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC) : -1;
    SHARDIO_NEED(file >= 0, "%.200s: expected a regular file that can be read", name);
    int wrong = fstat(file, &status) || !S_ISREG(status.st_mode) ||
                (header ? (uint64_t)status.st_size != nbytes : (uint64_t)status.st_size > nbytes);
    if (wrong) shardio_fail(set, "%.200s: expected a regular file of %llu bytes", name, (unsigned long long)nbytes);
    else if (header && !(wrong = shardio_pread(set, file, name, found, SHARDIO_HEADER, 0)) &&
             (wrong = memcmp(found, header, SHARDIO_HEADER)))
        shardio_fail(set, "%.200s: expected the header of its type and shape", name);
    if (wrong) close(file);
    return wrong ? -1 : file;
}

/* Reads a table, whose sha256 must be right. Returns its rows, or NULL. */
static inline const unsigned char *shardio_load(shardio_set *set, const shardio_node *node, const char *header) {
    const char *name = shardio_get(node, "file")->text;
    uint64_t nbytes = shardio_number_of(node, "nbytes");
    int file = shardio_open_file(set, name, nbytes, header);
    unsigned char *data = file < 0 ? NULL : shardio_take(set, nbytes);
    int wrong = !data || shardio_pread(set, file, name, data, nbytes, 0);
    if (file >= 0) close(file);
    if (wrong) return NULL;
    char sha256[65];
    shardio_sha sha = SHARDIO_SHA_NEW;
    shardio_sha_add(&sha, data, nbytes);
    shardio_sha_end(&sha, sha256);
    if (!strcmp(sha256, shardio_get(node, "sha256")->text)) return data + SHARDIO_HEADER;
    return shardio_fail(set, "%.200s: expected another sha256 than %s", name, sha256), NULL;
}

static inline int shardio_open_shard(shardio_set *set, const shardio_part *part, const shardio_node *shard) {
    char header[SHARDIO_HEADER];
    shardio_header(header, "", part, shardio_number_of(shard, "num_samples"));
    return shardio_open_file(set, shardio_get(shard, "file")->text, shardio_number_of(shard, "nbytes"), header);
}

/* Loads the tables of the split, and opens each of its files once. */
static inline int shardio_open_split(shardio_set *set) {
    char header[SHARDIO_HEADER], descr[SHARDIO_HEADER - 100], *at = descr, *end = descr + sizeof descr;
    const shardio_node *columns = shardio_get(set->index_file, "columns");
    at += snprintf(at, 200, "[%s('key', '|S%u'), ('source_width', '<u4'), ('source_height', '<u4'), ('crc32', '<u4')",
                   set->has_label ? "('label', '<i8'), " : "", (unsigned)set->key_nbytes);
    for (const shardio_node *column = columns ? columns->first : NULL; column; column = column->next)
        at += snprintf(at, (size_t)(end - at), ", ('%s', '%s')", column->first->text, column->first->next->text);
    snprintf(at, (size_t)(end - at), "]");
    shardio_header(header, descr, NULL, set->num_samples);
    if (!(set->index = shardio_load(set, set->index_file, header))) return -1;
    for (uint64_t i = 0; set->has_label && set->num_classes && i < set->num_samples; i++)
        SHARDIO_NEED((uint64_t)shardio_label(set, i) < set->num_classes, "%.200s: expected labels below %llu",
                     shardio_get(set->index_file, "file")->text, (unsigned long long)set->num_classes);
    for (shardio_part *part = set->parts; part < set->parts + set->num_parts; part++) {
        shardio_header(header, "'<u4'", NULL, part->num_rows);
        if (part->crc32_file && !(part->crc32 = shardio_load(set, part->crc32_file, header))) return -1;
        shardio_header(header, "'<i8'", NULL, set->num_samples);
        for (shardio_part *other = set->parts; other < part; other++)
            if (other->order_file == part->order_file) part->order = other->order;
        if (part->order_file && !part->order && !(part->order = shardio_load(set, part->order_file, header))) return -1;
        for (uint64_t i = 0; part->order && i < set->num_samples; i++)
            SHARDIO_NEED(shardio_little(part->order + 8 * i, 8) < part->num_rows, "%.200s: expected rows below %llu",
                         shardio_get(part->order_file, "file")->text, (unsigned long long)part->num_rows);
        for (const shardio_node *shard = part->shards->first; shard; shard = shard->next) {
            int file = shardio_open_shard(set, part, shard);
            if (file < 0) return -1;
            close(file);
        }
    }
    return 0;
}

static inline int shardio_open_manifest(shardio_set *set, const char *split) {
    shardio_node root = {0}, *document = shardio_take(set, sizeof root);
    int file = shardio_open_file(set, "manifest.json", 64 << 20, NULL);
    if (file < 0 || !document) return -1;
    off_t size = lseek(file, 0, SEEK_END);
    char *text = size >= 0 && size <= 64 << 20 ? shardio_take(set, (uint64_t)size + 1) : NULL;
    int wrong = !text || shardio_pread(set, file, "manifest.json", text, (uint64_t)size, 0);
    close(file);
    if (wrong) return -1;
    set->at = text;
    SHARDIO_TRY(shardio_value(set, document, 0));
    shardio_space(set);
    SHARDIO_NEED(set->at == text + size, "manifest.json: expected one JSON object in ASCII");
    if (!(set->files = shardio_take(set, (set->num_objects + 1) * sizeof *set->files))) return -1;
    SHARDIO_TRY(shardio_check(set, document, "M"));
    SHARDIO_TRY(shardio_sort(set, set->files, set->num_files, shardio_by_file));
    for (size_t i = 0; i < set->num_files; i++)
        SHARDIO_NEED(strcasecmp(set->files[i]->text, "manifest.json"), "manifest.json: expected other files");
    const shardio_node *classes = shardio_get(document, "classes"), *names = shardio_get(document, "class_names");
    set->num_classes = classes->count;
    SHARDIO_TRY(shardio_distinct(set, classes));
    SHARDIO_NEED(!names || names->count == classes->count, "manifest.json: expected a class name for each class");
    shardio_sha sha = SHARDIO_SHA_NEW;
    shardio_hash(&sha, document, 1);
    shardio_sha_end(&sha, set->digest);
    SHARDIO_NEED(!strcmp(set->digest, shardio_get(document, "digest")->text), "manifest.json: expected the digest %s, "
                 "found %s", set->digest, shardio_get(document, "digest")->text);
    const shardio_node *shape = shardio_get(document, "sample_shape")->first, *splits = shardio_get(document, "splits");
    for (int i = 0; shape; shape = shape->next) set->shape[i++] = strtoull(shape->text, NULL, 10);
    for (const shardio_node *each = splits->first; each; each = each->next) SHARDIO_TRY(shardio_split(set, each));
    const shardio_node *chosen = shardio_get(splits, split);
    SHARDIO_NEED(chosen, "manifest.json: expected a split %.80s", split);
    return shardio_split(set, chosen);
}

/* --- the door ----------------------------------------------------------------------------------------------------- */

/* Opens a split of the set in a folder. Call shardio_close afterwards even if this fails. */
static inline int shardio_open(shardio_set *set, const char *folder, const char *split) {
    memset(set, 0, sizeof *set);
    char *copy = shardio_take(set, strlen(folder) + 1);
    if (!copy) return -1;
    set->folder = strcpy(copy, folder);
    SHARDIO_TRY(shardio_open_manifest(set, split));
    return shardio_open_split(set);
}

/* Returns "pixels" or an array of the open split; NULL if the split has none of this name. */
static inline const shardio_part *shardio_find(const shardio_set *set, const char *name) {
    const shardio_part *part = set->parts;
    while (part < set->parts + set->num_parts && strcmp(part->name, name)) part++;
    return part < set->parts + set->num_parts ? part : NULL;
}

/* Copies the value of a sample to `out`, `part->row_nbytes` bytes. */
static inline int shardio_read(shardio_set *set, const shardio_part *part, uint64_t sample, void *out) {
    SHARDIO_NEED(sample < set->num_samples, "sample %llu: expected less than %llu", (unsigned long long)sample,
                 (unsigned long long)set->num_samples);
    uint64_t row = part->order ? shardio_little(part->order + 8 * sample, 8) : sample, first = row;
    const unsigned char *in_index = shardio_fields(set, sample) + set->key_nbytes + 8;
    const unsigned char *crc32 = part->crc32 ? part->crc32 + 4 * row : in_index;
    const shardio_node *shard = part->shards->first;
    for (; first >= shardio_number_of(shard, "num_samples"); shard = shard->next)
        first -= shardio_number_of(shard, "num_samples");
    int file = shardio_open_shard(set, part, shard);
    if (file < 0) return -1;
    const char *name = shardio_get(shard, "file")->text;
    int wrong = shardio_pread(set, file, name, out, part->row_nbytes, SHARDIO_HEADER + first * part->row_nbytes);
    close(file);
    SHARDIO_NEED(wrong || shardio_crc32(out, part->row_nbytes) == shardio_little(crc32, 4),
                 "%.200s: sample %llu: expected another crc32", name, (unsigned long long)sample);
    return wrong;
}
#endif
