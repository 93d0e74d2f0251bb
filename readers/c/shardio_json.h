/* Memory, checksums, JSON and the rules for single values of a manifest, for shardio.h, which includes this file.

   Strings are turned into canonical JSON as they are parsed, so the digest is a hash of a walk through the values. */
#ifndef SHARDIO_JSON_H
#define SHARDIO_JSON_H

static inline void *shardio_take(shardio_set *set, uint64_t nbytes) { /* zeros, which shardio_close frees */
    nbytes = (nbytes + 15) / 8 * 8;
    if (!set->memory || set->memory->size - set->memory->used < nbytes) {
        uint64_t size = nbytes > 65536 ? nbytes : 65536;
        struct shardio_block *block = size < SIZE_MAX / 2 ? calloc(1, sizeof *block + size) : NULL;
        if (!block) return shardio_fail(set, "out of memory"), NULL;
        block->next = set->memory, block->size = size, set->memory = block;
    }
    set->memory->used += nbytes;
    return (char *)set->memory->bytes + set->memory->used - nbytes;
}

static inline void shardio_close(shardio_set *set) {
    for (struct shardio_block *next; set->memory; set->memory = next) next = set->memory->next, free(set->memory);
}

static inline uint32_t shardio_crc32(const unsigned char *data, uint64_t nbytes) {
    uint32_t crc = ~0u;
    while (nbytes--) {
        crc ^= *data++;
        for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (crc & 1 ? 0xedb88320u : 0);
    }
    return ~crc;
}

typedef struct { uint32_t state[8]; uint64_t nbytes; unsigned char block[64]; } shardio_sha;
#define SHARDIO_SHA_NEW {{0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, \
                          0x5be0cd19}, 0, {0}}
#define SHARDIO_TURN(x, a, b, c) (((x) >> a | (x) << (32 - a)) ^ ((x) >> b | (x) << (32 - b)) ^ (c))

static inline void shardio_sha_block(shardio_sha *sha) {
    static const uint32_t k[64] = {
        0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5, 0xd807aa98,
        0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786,
        0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da, 0x983e5152, 0xa831c66d, 0xb00327c8,
        0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967, 0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13,
        0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85, 0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819,
        0xd6990624, 0xf40e3585, 0x106aa070, 0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a,
        0x5b9cca4f, 0x682e6ff3, 0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7,
        0xc67178f2};
    uint32_t w[64], v[8];
    memcpy(v, sha->state, sizeof v);
    for (int i = 0; i < 64; i++) {
        const unsigned char *b = sha->block + i % 16 * 4;
        if (i < 16) w[i] = (uint32_t)b[0] << 24 | (uint32_t)b[1] << 16 | (uint32_t)b[2] << 8 | b[3];
        else w[i] = w[i - 16] + w[i - 7] + SHARDIO_TURN(w[i - 15], 7, 18, w[i - 15] >> 3) +
                    SHARDIO_TURN(w[i - 2], 17, 19, w[i - 2] >> 10);
        uint32_t e = v[4], e25 = e >> 25 | e << 7, a = v[0], a22 = a >> 22 | a << 10;
        uint32_t sum = v[7] + SHARDIO_TURN(e, 6, 11, e25) + ((e & v[5]) ^ (~e & v[6])) + k[i] + w[i];
        uint32_t mix = SHARDIO_TURN(a, 2, 13, a22) + ((a & v[1]) ^ (a & v[2]) ^ (v[1] & v[2]));
        memmove(v + 1, v, 28);
        v[4] += sum, v[0] = sum + mix;
    }
    for (int i = 0; i < 8; i++) sha->state[i] += v[i];
}

static inline void shardio_sha_add(shardio_sha *sha, const void *data, uint64_t nbytes) {
    for (const unsigned char *byte = data; nbytes--; byte++) {
        sha->block[sha->nbytes++ % 64] = *byte;
        if (sha->nbytes % 64 == 0) shardio_sha_block(sha);
    }
}

static inline void shardio_sha_end(shardio_sha *sha, char hex[65]) {
    unsigned char length[8];
    for (int i = 0; i < 8; i++) length[i] = (unsigned char)(sha->nbytes * 8 >> (56 - 8 * i));
    shardio_sha_add(sha, "\x80", 1);
    while (sha->nbytes % 64 != 56) shardio_sha_add(sha, "", 1);
    shardio_sha_add(sha, length, 8);
    for (int i = 0; i < 8; i++) snprintf(hex + 8 * i, 9, "%08x", (unsigned)sha->state[i]);
}

/* --- JSON --------------------------------------------------------------------------------------------------------- */

static inline void shardio_space(shardio_set *set) { set->at += strspn(set->at, " \t\n\r"); }

static inline const char *shardio_string(shardio_set *set) { /* canonical text, without quotes */
    const char *at = set->at + 1;
    size_t most = 1;
    for (const char *c = at; *c && *c != '"'; c += *c == '\\' && c[1] ? 2 : 1) most += 6;
    char *text = shardio_take(set, most), *out = text;
    for (int high = 0; text;) {
        unsigned unit = (unsigned char)*at++, escaped = unit == '\\' ? (unsigned char)*at : 0;
        if (unit == '"' && !high) return set->at = at, text;
        if (unit < ' ' || unit > 0x7f || unit == '"' || (escaped && !strchr("\"\\/bfnrtu", (int)escaped))) break;
        if (escaped == 'u') {
            char digits[5] = {0}, *end;
            strncpy(digits, at + 1, 4);
            unit = (unsigned)strtoul(digits, &end, 16);
            if (end != digits + 4 || strspn(digits, "0123456789abcdefABCDEF") < 4) break;
            at += 5;
        } else if (unit == '\\') {
            if (!escaped) break;
            unit = escaped == 'b' ? 8 : escaped == 'f' ? 12 : escaped == 'n' ? 10 : escaped == 'r' ? 13
                 : escaped == 't' ? 9 : escaped;
            at++;
        }
        int low = unit >= 0xdc00 && unit <= 0xdfff; /* alone, it stands for a byte, or for nothing */
        if (high ? !low : low && (unit < 0xdc80 || unit > 0xdcff)) break;
        high = unit >= 0xd800 && unit <= 0xdbff;
        const char *names = unit < ' ' && unit ? strchr("\bb\tt\nn\ff\rr", (int)unit) : NULL;
        if (names || unit == '"' || unit == '\\') *out++ = '\\', *out++ = names ? names[1] : (char)unit;
        else if (unit >= ' ' && unit <= '~') *out++ = (char)unit;
        else out += snprintf(out, 7, "\\u%04x", unit & 0xffff);
    }
    return shardio_fail(set, "manifest.json: expected a string in ASCII without lone surrogates"), NULL;
}

static inline size_t shardio_digits(const char **at) {
    const char *start = *at;
    *at += strspn(start, "0123456789");
    return (size_t)(*at - start);
}

static inline const char *shardio_number(shardio_set *set, char *type) {
    const char *at = set->at + (*set->at == '-'), *first = at;
    size_t whole = shardio_digits(&at);
    int wrong = !whole || (*first == '0' && whole > 1);
    *type = 'i';
    if (*at == '.') *type = *at++, wrong |= !shardio_digits(&at);
    if (*at == 'e' || *at == 'E') *type = '.', at++, at += *at == '+' || *at == '-', wrong |= !shardio_digits(&at);
    wrong |= *type == 'i' ? at - set->at > 4300 : !isfinite(strtod(set->at, NULL));
    char *text = wrong ? NULL : shardio_take(set, (uint64_t)(at - set->at) + 1);
    if (!text) return shardio_fail(set, "manifest.json: expected a JSON value in the range of float64"), NULL;
    memcpy(text, set->at, (size_t)(at - set->at));
    set->at = at;
    return strcmp(text, "-0") ? text : "0";
}

static int shardio_by_key(const void *a, const void *b) {
    return strcmp((*(shardio_node *const *)a)->key, (*(shardio_node *const *)b)->key);
}

static int shardio_by_text(const void *a, const void *b) {
    return strcmp((*(shardio_node *const *)a)->text, (*(shardio_node *const *)b)->text);
}

static int shardio_by_file(const void *a, const void *b) {
    return strcasecmp((*(shardio_node *const *)a)->text, (*(shardio_node *const *)b)->text);
}

static inline int shardio_sort(shardio_set *set, const shardio_node **nodes, size_t count,
                               int (*compare)(const void *, const void *)) {
    if (count) qsort(nodes, count, sizeof *nodes, compare);
    for (size_t i = 1; i < count; i++)
        SHARDIO_NEED(compare(&nodes[i - 1], &nodes[i]), "manifest.json: expected distinct names, found %.80s twice",
                     compare == shardio_by_key ? nodes[i]->key : nodes[i]->text);
    return 0;
}

static inline const shardio_node **shardio_children(shardio_set *set, const shardio_node *node) {
    const shardio_node **nodes = shardio_take(set, (node->count + 1) * sizeof *nodes), **into = nodes;
    for (shardio_node *child = node->first; nodes && child; child = child->next) *into++ = child;
    return nodes;
}

/* Whether the strings of a list differ. */
static inline int shardio_distinct(shardio_set *set, const shardio_node *list) {
    const shardio_node **nodes = shardio_children(set, list);
    return nodes ? shardio_sort(set, nodes, list->count, shardio_by_text) : -1;
}

static inline int shardio_value(shardio_set *set, shardio_node *node, int depth) {
    static const char *const words[] = {"true", "false", "null"};
    shardio_space(set);
    char end = *set->at == '{' ? '}' : ']';
    node->type = *set->at;
    if (*set->at == '"') return node->text = shardio_string(set), node->text ? 0 : -1;
    for (int i = 0; i < 3; i++)
        if (!strncmp(set->at, words[i], strlen(words[i])))
            return node->text = words[i], set->at += strlen(words[i]), 0;
    if (*set->at != '{' && *set->at != '[') return node->text = shardio_number(set, &node->type), node->text ? 0 : -1;
    SHARDIO_NEED(depth <= 100, "manifest.json: expected at most 100 levels, found more");
    set->at++, set->num_objects += end == '}';
    shardio_space(set);
    for (shardio_node **last = &node->first; *set->at != end; last = &(*last)->next, node->count++) {
        SHARDIO_NEED(!node->count || *set->at == ',', "manifest.json: expected ',' or '%c' after a value", end);
        set->at += node->count > 0;
        shardio_space(set);
        if (!(*last = shardio_take(set, sizeof **last))) return -1;
        if (end == '}') {
            if (*set->at != '"' || !((*last)->key = shardio_string(set)))
                return shardio_fail(set, "manifest.json: expected a key in ASCII");
            shardio_space(set);
            SHARDIO_NEED(*set->at == ':', "manifest.json: expected ':' after %.80s", (*last)->key);
            set->at++;
        }
        SHARDIO_TRY(shardio_value(set, *last, depth + 1));
        shardio_space(set);
    }
    set->at++;
    if (end == ']') return 0;
    const shardio_node **sorted = shardio_children(set, node);
    if (!sorted || shardio_sort(set, sorted, node->count, shardio_by_key)) return -1;
    for (size_t i = node->count; i--;) ((shardio_node *)sorted[i])->next = (shardio_node *)sorted[i + 1];
    node->first = (shardio_node *)sorted[0];
    return 0;
}

static inline void shardio_hash_text(shardio_sha *sha, const char *text) { shardio_sha_add(sha, text, strlen(text)); }

static inline void shardio_hash(shardio_sha *sha, const shardio_node *node, int is_root) {
    int is_object = node->type == '{', is_list = node->type == '[', has_quotes = node->type == '"';
    const char *comma = "";
    shardio_hash_text(sha, is_object ? "{" : is_list ? "[" : has_quotes ? "\"" : "");
    shardio_hash_text(sha, node->text ? node->text : "");
    for (const shardio_node *child = node->first; child; child = child->next) {
        if (is_root && (!strcmp(child->key, "digest") || !strcmp(child->key, "provenance"))) continue;
        shardio_hash_text(sha, comma);
        comma = ",";
        if (is_object) shardio_hash_text(sha, "\""), shardio_hash_text(sha, child->key), shardio_hash_text(sha, "\":");
        shardio_hash(sha, child, 0);
    }
    shardio_hash_text(sha, is_object ? "}" : is_list ? "]" : has_quotes ? "\"" : "");
}

/* --- the values of a manifest, each by itself --------------------------------------------------------------------- */

static inline const shardio_node *shardio_get(const shardio_node *node, const char *key) {
    const shardio_node *child = node->first;
    while (child && strcmp(child->key, key)) child = child->next;
    return child;
}

static inline uint64_t shardio_number_of(const shardio_node *node, const char *key) {
    return strtoull(shardio_get(node, key)->text, NULL, 10);
}

static inline int shardio_is_name(const char *text, const char *also, size_t most) {
    static const char letters[] = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz_";
    char all[80];
    snprintf(all, sizeof all, "%s%s", letters, also);
    int is_file = *also == '.', first = *text && strchr(letters, *text) && !strchr(is_file ? "_" : "0123456789", *text);
    return first && strlen(text) <= most && strspn(text, all) == strlen(text);
}

static inline int shardio_is_in(const char *word, const char *list) { /* of words with a space on each side */
    char quoted[80];
    int length = snprintf(quoted, sizeof quoted, " %s ", word);
    return *word && !strchr(word, ' ') && length < (int)sizeof quoted && strstr(list, quoted) != NULL;
}

/* Checks a value against a rule. '{', '[' and '+' are an object with any names, a list, and a list that is not empty,
   of values of the next rule. Capital letters are objects: "KEY = RULE", or "KEY ? RULE" if the key may be missing. */
static inline int shardio_check(shardio_set *set, const shardio_node *node, const char *rule) {
    const char *text = node->text ? node->text : "a list or an object", *key = node->key ? node->key : "manifest";
    int is_text = node->type == '"', good = 0;
    uint64_t count = node->type == 'i' && strlen(text) < 18 && *text != '-' ? strtoull(text, NULL, 10) : UINT64_MAX;
    const char *fields = NULL;
    switch (*rule) {
    case 'M': fields = "format = f format_version = v sample_shape = x classes = [s class_names ? +s splits = {P "
                       "rejects = R provenance = o digest = h"; break;
    case 'P': fields = "num_samples = 1 index = I shards = [S orders ? +F order ? 0 arrays ? {A squashed ? t"; break;
    case 'I': fields = "file = n nbytes = 0 sha256 = h key_nbytes = 0 columns ? +[s label ? l"; break;
    case 'A': fields = "kind = k dtype = d shape = [z crc32 = F shards = +S order ? 0 names ? +s"; break;
    case 'F': fields = "file = n nbytes = 0 sha256 = h"; break;
    case 'S': fields = "file = n nbytes = 0 sha256 = h num_samples = 1"; break;
    case 'R': fields = "file = n nbytes = 0 sha256 = h num_rejects = 0"; break;
    case 'f': good = is_text && !strcmp(text, "shardio"); break;
    case 'v': good = count == 1; break;
    case 'h': good = is_text && strlen(text) == 64 && strspn(text, "0123456789abcdef") == 64; break;
    case 'n': if ((good = is_text && shardio_is_name(text, ".-", 200))) set->files[set->num_files++] = node; break;
    case 'k': good = is_text && shardio_is_in(text, " array mask boxes image "); break;
    case 'd': good = is_text && shardio_is_in(text, " |b1 |u1 |i1 <u2 <i2 <u4 <i4 <u8 <i8 <f2 <f4 <f8 "); break;
    case '0': good = count <= SHARDIO_MAX_COUNT; break;
    case '1': good = count <= SHARDIO_MAX_COUNT && count; break;
    case 'z': good = count <= 65536 && count; break;
    case 'l': good = node->type == 'f'; break;
    case 't': good = node->type == 't'; break;
    case 's': good = is_text; break;
    case 'o': good = node->type == '{'; break;
    case 'x': if (node->type == 'n') return 0;
              good = node->type == '[' && node->count == 3; rule = "[z"; break;
    case '{': good = node->type == '{' && node->count; break;
    default: good = node->type == '[' && (*rule == '[' || node->count);
    }
    SHARDIO_NEED(fields ? node->type == '{' : good, "manifest.json: %.80s: found %.80s", key, text);
    size_t found = 0;
    char name[32], mark, of[8];
    for (int used; fields && sscanf(fields, "%31s %c %7s%n", name, &mark, of, &used) == 3; fields += used) {
        const shardio_node *child = shardio_get(node, name);
        SHARDIO_NEED(child || mark == '?', "manifest.json: %.80s: expected a key %s", key, name);
        if (child) SHARDIO_TRY(shardio_check(set, child, of));
        found += child != NULL;
    }
    SHARDIO_NEED(!fields || found == node->count, "manifest.json: %.80s: found an unknown key", key);
    for (const shardio_node *child = strchr("[+{", *rule) ? node->first : NULL; child; child = child->next)
        SHARDIO_TRY(shardio_check(set, child, rule + 1));
    return 0;
}

#endif
