/* Lengths of batch entries that arrive with a call: int32 tensors on the device, read here so that nothing wrong in them reaches a kernel.
 * A part of call.h, which says what the constants of artefact_config.h are. */
#include <stdlib.h>

/* Names of the tensors, and what they say: nothing; keys of each batch entry; where sequences begin in q and in k, and their end. */
static const char *const kTables[] = {FLASHTIR_TABLES NULL};
/* Names of the integers behind them: the most queries of a packed sequence, and the most keys where a kernel goes by them. */
static const char *const kIntegers[] = {FLASHTIR_INTEGERS NULL};
enum { INTEGERS = sizeof kIntegers / sizeof *kIntegers - 1 };

/* Call a function of TVM's runtime by its name. */
static int call_runtime(const char *name, TVMFFIAny *args, int count, TVMFFIAny *answer) {
  TVMFFIByteArray text = {name, strlen(name)};
  TVMFFIObjectHandle function = NULL;
  if (TVMFFIFunctionGetGlobal(&text, &function)) return -1;
  if (function == NULL) return fail("RuntimeError", "TVM's runtime was wanted, found no function %s: load libtvm_runtime.so first", name);
  int failed = TVMFFIFunctionCall(function, args, count, answer);
  TVMFFIObjectDecRef(function);
  return failed ? -1 : 0;
}

/* Copy the numbers of a table to the host, behind all that the current stream has been given to do before. */
static int read_table(DLTensor *table, int32_t *numbers) {
  int64_t bytes = table->shape[0] * (int64_t)sizeof *numbers;
  TVMFFIAny answer = {.type_index = kTVMFFINone};
  if (bytes == 0) return 0;
  if (table->device.device_type == kDLCPU) {
    memcpy(numbers, table->data, bytes);
    return 0;
  }
  void *stream = TVMFFIEnvGetStream(table->device.device_type, table->device.device_id);
  TVMFFIAny wait[] = {{.type_index = kTVMFFIDevice, .v_device = table->device}, {.type_index = kTVMFFIInt, .v_int64 = (intptr_t)stream}};
  TVMFFIAny copy[] = {{.type_index = kTVMFFIDLTensorPtr, .v_ptr = table}, {.type_index = kTVMFFIOpaquePtr, .v_ptr = numbers},
                      {.type_index = kTVMFFIInt, .v_int64 = bytes}};
  if (stream != NULL && call_runtime("runtime.Device_StreamSync", wait, 2, &answer)) return -1;
  return call_runtime("runtime.TVMTensorCopyToBytes", copy, 3, &answer);
}

static int check_key_lengths(const int32_t *lengths, int64_t batch, int64_t keys) {
  for (int64_t b = 0; b < batch; ++b)
    if (lengths[b] < 0 || lengths[b] > keys)
      return fail("ValueError", "%s[%lld] is %d, wanted 0 to %lld, the rows of k", kTables[0], (long long)b, (int)lengths[b],
                  (long long)keys);
  return 0;
}

/* Where `count` sequences begin, and the end of the last; `longest` receives the rows of the longest. */
static int check_begins(const char *name, const int32_t *begins, int64_t count, int64_t rows, const char *of, int64_t *longest) {
  *longest = 0;
  if (begins[0] != 0) return fail("ValueError", "%s[0] is %d, wanted 0", name, (int)begins[0]);
  for (int64_t b = 1; b <= count; ++b) {
    if (begins[b] < begins[b - 1])
      return fail("ValueError", "%s[%lld] is %d, wanted %d or more, where the sequence before begins", name, (long long)b, (int)begins[b],
                  (int)begins[b - 1]);
    if (begins[b] > rows)
      return fail("ValueError", "%s[%lld] is %d, wanted at most %lld, the rows of %s", name, (long long)b, (int)begins[b],
                  (long long)rows, of);
    if (begins[b] - begins[b - 1] > *longest) *longest = begins[b] - begins[b - 1];
  }
  return 0;
}

static int check_table(const char *name, const DLTensor *table, DLDevice first, int64_t size) {
  char found[32], right[32];
  DLDataType type = table->dtype;
  if (type.code != kDLInt || type.bits != 32 || type.lanes != 1)
    return fail("TypeError", "%s has dtype %s, wanted int32", name, dtype_name(type, found));
  if (table->ndim != 1) return fail("ValueError", "%s has %d dimensions, wanted 1", name, (int)table->ndim);
  if (table->device.device_type != first.device_type || table->device.device_id != first.device_id)
    return fail("ValueError", "%s is on %s, wanted %s, where q is", name, device_name(table->device, found), device_name(first, right));
  if (size >= 0 && table->shape[0] != size)
    return fail("ValueError", "%s.shape[0] is %lld, wanted %lld, %s", name, (long long)table->shape[0], (long long)size,
                FLASHTIR_LENGTHS == PACKED ? "as that of cu_seqlens_q" : "the batch");
  if (table->shape[0] < (FLASHTIR_LENGTHS == PACKED))
    return fail("ValueError", "%s.shape[0] is 0, wanted a number more than there are sequences", name);
  if (table->strides && table->shape[0] > 1 && table->strides[0] != 1)
    return fail("ValueError", "%s has stride %lld in dimension 0, wanted 1: pass a contiguous tensor", name,
                (long long)table->strides[0]);
  if (table->shape[0] > INT32_MAX)
    return fail("ValueError", "%s.shape[0] is %lld, wanted less than 2^31", name, (long long)table->shape[0]);
  return 0;
}

/* Kernels number the tiles of all sequences and heads with 32 bits; each sequence counts as the longest. */
static int check_tiles(int64_t sequences, int64_t longest, int64_t heads) {
  enum { LEAST_ROWS = 16 };
  if ((double)sequences * (double)heads * (double)((longest + LEAST_ROWS - 1) / LEAST_ROWS) < 2147483648.0) return 0;
  return fail("ValueError", "there are %lld sequences of up to %lld rows and %lld heads, wanted fewer than 2^31 tiles of %d rows in all: "
              "split it over several calls", (long long)sequences, (long long)longest, (long long)heads, (int)LEAST_ROWS);
}

/* The arguments of the lengths: tables, which get no offset in `plain`, and integers. `sequences` and `longest` receive the number of
 * packed sequences, and the queries and keys of the longest. */
static int check_lengths(const TVMFFIAny *args, TVMFFIAny *checked, DLTensor *plain, const DLTensor *q, const DLTensor *k,
                         int64_t *sequences, int64_t longest[2]) {
  int failed = 0;
  for (int i = 0; i < TABLES && !failed; ++i) {
    const DLTensor *table = as_tensor(&args[i]);
    if (table == NULL) return fail("TypeError", "%s is %s, wanted a tensor", kTables[i], type_name(&args[i]));
    failed = check_table(kTables[i], table, q->device, i ? plain[0].shape[0] : FLASHTIR_LENGTHS == KEYS ? q->shape[0] : -1);
    if (failed) return -1;
    if (table->data == NULL && table->shape[0] > 0) return fail("ValueError", "%s has no data, wanted a pointer to its elements", kTables[i]);
    plain[i] = *table;
    plain[i].data = (char *)table->data + table->byte_offset;
    plain[i].byte_offset = 0;
    plain[i].strides = NULL;
    checked[i] = (TVMFFIAny){.type_index = kTVMFFIDLTensorPtr, .v_ptr = &plain[i]};
  }
  int32_t *numbers = malloc(TABLES * (size_t)plain[0].shape[0] * sizeof *numbers + 1);
  if (numbers == NULL) return fail("RuntimeError", "memory for the numbers of %s was wanted, found none", kTables[0]);
  for (int i = 0; i < TABLES && !failed; ++i) failed = read_table(&plain[i], numbers + i * plain[0].shape[0]);
  if (!failed && FLASHTIR_LENGTHS == KEYS) failed = check_key_lengths(numbers, q->shape[0], k->shape[1]);
  if (!failed && FLASHTIR_LENGTHS == PACKED) {
    *sequences = plain[0].shape[0] - 1;
    failed = check_begins(kTables[0], numbers, *sequences, q->shape[0], "q", &longest[0]) ||
             check_begins(kTables[1], numbers + *sequences + 1, *sequences, k->shape[0], "k", &longest[1]) ||
             check_tiles(*sequences, longest[0], q->shape[1]) || check_tiles(*sequences, longest[1], k->shape[1]);
  }
  free(numbers);
  if (failed) return -1;
  for (int i = 0; i < INTEGERS; ++i) {
    const TVMFFIAny *most = &args[TABLES + i];
    if (most->type_index != kTVMFFIInt) return fail("TypeError", "%s is %s, wanted an int", kIntegers[i], type_name(most));
    if (most->v_int64 < longest[i])
      return fail("ValueError", "%s is %lld, wanted %lld or more, the %s of the longest sequence", kIntegers[i], (long long)most->v_int64,
                  (long long)longest[i], i ? "keys" : "queries");
    /* The grid has no use for more tiles than the longest sequence has. */
    checked[TABLES + i] = (TVMFFIAny){.type_index = kTVMFFIInt, .v_int64 = longest[i]};
  }
  return 0;
}

/* Outputs share no memory with the tables, which kernels read while they write. */
static int check_tables(const DLTensor *tables, const DLTensor *plain, const View *views) {
  for (int i = 0; i < TABLES; ++i)
    for (int output = FIRST_OUTPUT; output < TENSORS; ++output)
      if (check_apart(output, plain, views, &tables[i], NULL, tables[i].shape[0], kTables[i])) return -1;
  return 0;
}
