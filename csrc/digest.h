/* Digest of a piece of memory: has a weight changed since the last call?
 *
 * Eight lanes of 64 bits: each word goes into one through a 32 x 32 -> 64 bit product with a salt, and unmixed, so that nothing is lost where a product
 * is zero; the lanes are scrambled every 16 stripes. All 512 bits are compared: for memory that is not made to collide, equal digests mean equal numbers.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define MANY_TARGETS __attribute__((target_clones("avx512f", "avx2", "default"), optimize("O3")))
#else
#define MANY_TARGETS
#endif

typedef struct {
    uint64_t lanes[8];
} mg_digest_t;

MANY_TARGETS static void
digest_stripes(uint64_t *restrict lanes, const unsigned char *restrict data, size_t stripes)
{
    const uint64_t prime = 0x9E3779B185EBCA87ULL;
    uint64_t acc[8], word[8];
    memcpy(acc, lanes, sizeof acc);
    for (size_t s = 0; s < stripes; s++) {
        uint64_t salt = 0xC2B2AE3D27D4EB4FULL * (2 * (s % 16) + 1);
        memcpy(word, data + s * sizeof word, sizeof word);
        for (int i = 0; i < 8; i++) {
            uint64_t mixed = word[i] ^ (salt + prime * (uint64_t)(i + 1));
            acc[i] += (mixed & 0xFFFFFFFFULL) * (mixed >> 32) + ((word[i] << 32) | (word[i] >> 32));
        }
        if (s % 16 == 15)
            for (int i = 0; i < 8; i++) acc[i] = (acc[i] ^ (acc[i] >> 47) ^ salt) * prime;
    }
    for (int i = 0; i < 8; i++) lanes[i] = (acc[i] ^ (acc[i] >> 29) ^ stripes) * prime;
}

/* Takes `bytes` bytes into the digest. */
static inline void
mg_digest(mg_digest_t *digest, const void *data, size_t bytes)
{
    unsigned char rest[64] = {0};
    digest_stripes(digest->lanes, data, bytes / 64);
    if (bytes % 64) memcpy(rest, (const unsigned char *)data + bytes / 64 * 64, bytes % 64);
    digest_stripes(digest->lanes, rest, 1);
}
