/* Buckets: where plans were tuned at several lengths, a call first asks the variants of those that it is nearest to. A part of call.h,
 * which says what the constants of artefact_config.h are. */

/* Query rows and key rows that were tuned at, and the numbers of all variants in the order in which such calls ask them. */
typedef struct {
  int64_t queries, keys;
  int order[VARIANTS];
} Bucket;
enum { BUCKETS = FLASHTIR_BUCKET_COUNT };
static const Bucket kBuckets[BUCKETS + 1] = {FLASHTIR_BUCKETS{0}};

static uint64_t larger(uint64_t a, uint64_t b) { return a > b ? a : b; }
static uint64_t smaller(uint64_t a, uint64_t b) { return a < b ? a : b; }
static uint64_t within_rows(int64_t length) { return length < 1 ? 1 : length > MOST_ROWS ? MOST_ROWS : (uint64_t)length; }

/* The bucket whose abs(log2(queries / its)) + abs(log2(keys / its)) is least, of equally near ones the last, which is the largest: the
 * product of the two ratios, a fraction whose parts are below 2^60, orders alike and is exact. Lengths are the most that the host knows of
 * a call: the rows of q and k, or those of the longest packed sequence. */
static const Bucket *nearest_bucket(int64_t queries, int64_t keys) {
  uint64_t n = within_rows(queries), m = within_rows(keys), over = 0, under = 1;
  const Bucket *nearest = kBuckets;
  for (int i = 0; i < BUCKETS; ++i) {
    uint64_t rows = (uint64_t)kBuckets[i].queries, columns = (uint64_t)kBuckets[i].keys;
    uint64_t high = larger(n, rows) * larger(m, columns), low = smaller(n, rows) * smaller(m, columns);
    if (i && (unsigned __int128)high * under > (unsigned __int128)over * low) continue;
    nearest = &kBuckets[i], over = high, under = low;
  }
  return nearest;
}

/* The number of the manifest's bucket that calls with so many query rows and key rows are nearest to, for whoever asks. */
static int tell_bucket(const TVMFFIAny *args, int32_t count, TVMFFIAny *result) {
  if (count != 2 || args[0].type_index != kTVMFFIInt || args[1].type_index != kTVMFFIInt)
    return fail("TypeError", "the query rows and key rows of a call are wanted, two ints, found %d arguments or others", (int)count);
  *result = (TVMFFIAny){.type_index = kTVMFFIInt, .v_int64 = nearest_bucket(args[0].v_int64, args[1].v_int64) - kBuckets};
  return 0;
}
