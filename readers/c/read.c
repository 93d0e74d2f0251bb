/* Reads values of sets, for tests and as an example. Each line of the input has FOLDER, SPLIT, PART and SAMPLE,
   separated by tabs; PART is "pixels" or the name of an array. Prints "ok LABEL KEY SHA256" for each line (the label is
   "-" if the index has none, the key is in hexadecimal, the sha256 is of the value), or "refused" and the reason.

   cc -O2 -o read read.c -lm && printf 'imagenet\tval\tpixels\t0\n' | ./read */
#include "shardio.h"

static int answer(shardio_set *set, const char *folder, const char *split, const char *name, const char *number) {
    if (shardio_open(set, folder, split)) return -1;
    const shardio_part *part = shardio_find(set, name);
    if (!part) return shardio_fail(set, "%s: expected pixels or an array", name);
    unsigned char *value = malloc(part->row_nbytes);
    uint64_t sample = strtoull(number, NULL, 10);
    if (!value) return shardio_fail(set, "out of memory");
    if (shardio_read(set, part, sample, value)) return free(value), -1;
    if (set->has_label) printf("ok %lld ", (long long)shardio_label(set, sample));
    else printf("ok - ");
    const unsigned char *key = shardio_fields(set, sample);
    uint64_t nbytes = set->key_nbytes;
    while (nbytes && !key[nbytes - 1]) nbytes--;
    for (uint64_t i = 0; i < nbytes; i++) printf("%02x", key[i]);
    char sha256[65];
    shardio_sha sha = SHARDIO_SHA_NEW;
    shardio_sha_add(&sha, value, part->row_nbytes);
    shardio_sha_end(&sha, sha256);
    printf(" %s\n", sha256);
    free(value);
    return 0;
}

int main(void) {
    static char line[8192];
    while (fgets(line, sizeof line, stdin)) {
        shardio_set set;
        char *folder = strtok(line, "\t\n"), *split = strtok(NULL, "\t\n"), *part = strtok(NULL, "\t\n");
        char *sample = strtok(NULL, "\t\n");
        if (!sample) return fprintf(stderr, "expected FOLDER, SPLIT, PART and SAMPLE\n"), 2;
        if (answer(&set, folder, split, part, sample)) printf("refused %s\n", set.error);
        shardio_close(&set);
        fflush(stdout);
    }
    return 0;
}
