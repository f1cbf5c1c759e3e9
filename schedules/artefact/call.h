/* A call of an artefact: which kernels it may go to, and the checks of all arguments before anything is launched or written. Both ways in,
 * entry.c and backward.c, are compiled with this file and a generated header, artefact_config.h, with these constants:
 *
 *   FLASHTIR_BACKWARD          1 for the gradients, 0 for the forward pass
 *   FLASHTIR_FUNCTION          name of the exported function, which others begin with: flash_attention_forward or flash_attention_backward,
 *                              with the workload's name behind it where the artefact holds several
 *   FLASHTIR_ALONE             1 where the artefact holds one workload
 *   FLASHTIR_FUNCTIONS(X)      symbols of all host functions that TVM generated
 *   FLASHTIR_VARIANTS(X)       the kernels that the artefact holds, best first; X takes for each
 *                                name           for messages, such as "mma for sm_80"
 *                                functions      in parentheses, those of FLASHTIR_FUNCTIONS that are its own, in the order of `Function`;
 *                                               NULL is what it has not
 *                                max_elements   most elements that a tensor may reach over; beyond: the number after it, as text
 *                                alignment      bytes that data must start on a multiple of, and on a GPU every row
 *                                queries, tiles, rows   it is for calls with at least so many queries, and tiles of so many query rows
 *                                strided        1 where it takes views with strides, 0 where contiguous tensors only
 *                                packed         1 where it is for grouped heads that share tiles, of fewer queries than `rows`
 *                                whole_rows     1 where sequences inside tensors are found by the number of a row
 *                                sum_rows       rows of a tile of sums of dq, 0 where it needs none
 *                                turns          1 where it needs to know whose turn it is at each of these tiles
 *                                operand_rows, operand_keys, operand_blocks   queries and keys of a tile of an operand whose gradient is
 *                                               summed, and how many blocks there shall be at least
 *                                codes          {major, minor, exact} for each architecture of its device code, then {0}
 *   FLASHTIR_BUCKET_COUNT, _BUCKETS   lengths that plans were tuned at, from the smallest on, none or some; for each {queries, keys,
 *                              {numbers of all variants, in the order in which such calls ask them}} with a comma behind it
 *   FLASHTIR_ARCHS             the architectures of all variants, for messages
 *   FLASHTIR_HEAD_DIM          channels D of q and k          FLASHTIR_VALUE_DIM    channels DV of v and out
 *   FLASHTIR_DTYPE_CODE, _BITS element type of q, k, v, out   FLASHTIR_DEVICE_TYPE  DLDeviceType of all tensors
 *   FLASHTIR_EXTRAS            the arguments behind scale, those of mask, score modification and sink: for each an Extra with a comma behind it
 *   FLASHTIR_OPERANDS          those of FLASHTIR_EXTRAS whose gradients are made, too: {name, number} with a comma behind it
 *   FLASHTIR_OPTIONAL          names of the arguments that may follow all others, for messages
 *   FLASHTIR_LENGTHS, _TABLES, _INTEGERS   who says how many rows batch entries have, by te_defs.lengths: 0 the tensors, 1 key_lengths,
 *                              2 cu_seqlens; and the names of these tensors and of the integers behind them, each as a text with a comma
 *   FLASHTIR_CALL              names of all arguments, for messages
 *
 * C and not C++: the artefact then needs no C++ runtime, and of TVM only a few functions of its stable C ABI. It is compiled with
 * -fexceptions, since TVM's pools of memory throw through it.
 */
#include <math.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <tvm/ffi/c_api.h>
#include <tvm/ffi/extra/c_env_api.h>

#include "artefact_config.h"
#define SYMBOL_OF(function, end) __tvm_ffi_##function##end
#define SYMBOL(function, end) SYMBOL_OF(function, end)
/* Head of an exported function: FLASHTIR_FUNCTION with something behind it, or nothing. */
#define EXPORTED(end) \
  TVM_FFI_DLL_EXPORT int SYMBOL(FLASHTIR_FUNCTION, end)(void *self, const TVMFFIAny *args, int32_t count, TVMFFIAny *result)

#include "tensors.h"
#include "extras.h"
enum { TABLES = FLASHTIR_LENGTHS == PACKED ? 2 : FLASHTIR_LENGTHS == KEYS ? 1 : 0 };
#include "lengths.h"

/* Device code of one architecture: exact, as of sm_90a or of a plan that others have no room for, runs on its own compute capability only;
 * other code also on later minors. */
typedef struct {
  int major, minor, exact;
} Code;

typedef int HostFunction(void *self, const TVMFFIAny *args, int32_t count, TVMFFIAny *result);
#if FLASHTIR_BACKWARD
/* Gradients of operands: for each of FLASHTIR_OPERANDS, a tensor behind the scale, the number of its argument. */
typedef struct {
  const char *name;
  int extra;
} Operand;
static const Operand kOperands[] = {FLASHTIR_OPERANDS{NULL, 0}};
enum { OPERANDS = sizeof kOperands / sizeof *kOperands - 1 };
/* For each of these behind the others: that makes it whole, that sums it in parts, and that adds these up; the last two, or none. */
enum { WHOLE, IN_PARTS, FOLD, FOR_AN_OPERAND };
typedef enum {
  DELTA, DELTA_THROUGH_LSE, GRADIENTS_OF_KEYS, GRADIENTS_OF_QUERIES, ZEROS, GRADIENTS_OF_VALUES,
  GRADIENTS_OF_OPERANDS, FUNCTIONS = GRADIENTS_OF_OPERANDS + OPERANDS * FOR_AN_OPERAND
} Function;
#else
typedef enum { KERNEL, NEGATIVE_SCALE_KERNEL, FUNCTIONS } Function;
#endif
typedef struct {
  const char *name;
  HostFunction *functions[FUNCTIONS];
  int64_t max_elements;
  const char *beyond;
  int alignment;
  int64_t queries, tiles, rows;
  int strided, packed, whole_rows, sum_rows, turns;
  int64_t operand_rows, operand_keys, operand_blocks;
  const Code *codes;
} Variant;

/* What TVM's runtime fills in when the artefact is loaded, as for its own host functions: memory of a device from a pool of this thread. NULL
 * where the runtime was not there then; the host functions would call through such pointers. */
#define RUNTIME __attribute__((weak, visibility("default")))
RUNTIME void *(*__TVMBackendAllocWorkspace)(int device_type, int device_id, uint64_t bytes, int dtype_code, int dtype_bits) = NULL;

/* Hidden, so that the linker binds this call inside the artefact: two artefacts in one process cannot call each other's kernel, and nobody
 * reaches the kernel past the checks. */
#define DECLARE(function) extern HostFunction function __attribute__((visibility("hidden")));
FLASHTIR_FUNCTIONS(DECLARE)
#define ALL(...) {__VA_ARGS__}
#define LIST(name, functions, max_elements, beyond, alignment, queries, tiles, rows, strided, packed, whole_rows, sum_rows, turns, \
             operand_rows, operand_keys, operand_blocks, ...) \
  {name, ALL functions, max_elements, beyond, alignment, queries, tiles, rows, strided, packed, whole_rows, sum_rows, turns, \
   operand_rows, operand_keys, operand_blocks, (const Code[]){__VA_ARGS__}},
static const Variant kVariants[] = {FLASHTIR_VARIANTS(LIST)};
enum { VARIANTS = sizeof kVariants / sizeof *kVariants };

enum { SCALE = TENSORS, FIRST_EXTRA, TABLE = FIRST_EXTRA + EXTRAS, ARGUMENTS = TABLE + TABLES + INTEGERS };
/* Arguments of a kernel whose tiles the heads of a group share, behind those of the call. */
enum { HEAD_SIZES = 3 };

static int check_groups(int64_t heads, int64_t key_heads) {
  if (heads && (key_heads == 0 || heads % key_heads))
    return fail("ValueError", "q has %lld heads and k has %lld, wanted a multiple of the key heads in q", (long long)heads,
                (long long)key_heads);
  return 0;
}

static int check_scale(const TVMFFIAny *arg, int *negative) {
  if (arg->type_index != kTVMFFIFloat && arg->type_index != kTVMFFIInt)
    return fail("TypeError", "scale is %s, wanted a number", type_name(arg));
  double scale = arg->type_index == kTVMFFIInt ? (double)arg->v_int64 : arg->v_float64;
  /* The kernel multiplies by log2(e), in float32. */
  if (!isfinite((float)(scale * 1.4426950408889634)))
    return fail("ValueError", "scale is %g, wanted a number whose product with log2(e) is finite in float32", scale);
  *negative = scale < 0;
  return 0;
}

/* Copy a text that TVM's runtime returned, and let go of it: short texts come in the value or as an object, as their maker liked. */
static void take_text(TVMFFIAny *value, char *text, size_t room) {
  TVMFFIByteArray bytes = {value->v_bytes, value->small_str_len};
  bool object = value->type_index == kTVMFFIStr;
  if (object) bytes = *(const TVMFFIByteArray *)((const char *)value->v_obj + sizeof(TVMFFIObject));
  if (object || value->type_index == kTVMFFISmallStr) snprintf(text, room, "%.*s", (int)bytes.size, bytes.data);
  if (object) TVMFFIObjectDecRef(value->v_obj);
}

/* Compute capability of a CUDA device as 100 * major + minor, asked of TVM's runtime once for each device; -1 where an error is set. */
static int capability_of(DLDevice device) {
  enum { COMPUTE_VERSION = 4, DEVICES = 64 };
  static _Atomic int known[DEVICES];
  bool kept = device.device_id >= 0 && device.device_id < DEVICES;
  if (kept && known[device.device_id]) return known[device.device_id];

  TVMFFIAny args[] = {{.type_index = kTVMFFIInt, .v_int64 = device.device_type}, {.type_index = kTVMFFIInt, .v_int64 = device.device_id},
                      {.type_index = kTVMFFIInt, .v_int64 = COMPUTE_VERSION}};
  TVMFFIAny answer = {.type_index = kTVMFFINone};
  if (call_runtime("runtime.GetDeviceAttr", args, 3, &answer)) return -1;

  char text[32] = "";
  int major = 0, minor = 0;
  take_text(&answer, text, sizeof text);
  if (sscanf(text, "%d.%d", &major, &minor) != 2)
    return fail("RuntimeError", "the compute capability of %s was wanted, found none: update TVM", device_name(device, text));
  if (kept) known[device.device_id] = 100 * major + minor;
  return 100 * major + minor;
}

static bool runs_on(const Variant *variant, int capability) {
  int major = capability / 100, minor = capability % 100;
  for (const Code *code = variant->codes; code->major; ++code)
    if (code->major == major && (code->exact ? code->minor == minor : code->minor <= minor)) return true;
  return FLASHTIR_DEVICE_TYPE == kDLCPU;
}

/* Whether a call of some batch entries, with so many queries at most, has those that a variant is for: enough rows for its tiles, and tiles
 * for all multiprocessors. The sizes of an empty tensor can have any product. */
static bool is_for(const Variant *variant, int64_t batch, int64_t queries, int64_t heads, int64_t key_heads) {
  if (variant->packed && (heads <= key_heads || queries >= variant->rows)) return false;
  double tiles = ceil((double)queries / (double)variant->rows);
  return queries >= variant->queries && tiles * (double)batch * (double)heads >= (double)variant->tiles;
}

/* Why a variant cannot serve a call, where the device is not the reason. */
enum { SERVES, TOO_LARGE, TOO_LONG, TOO_FAR, MISALIGNED, STRIDED, REASONS };
static const char *const kRemedies[REASONS] = {"", SPLIT, "split it over several calls", "pass a copy", "pass a copy",
                                               "pass a contiguous tensor"};
typedef struct {
  const Variant *variant;
  int reason;
  char text[160];
} Refusal;

static Refusal __attribute__((format(printf, 3, 4), cold)) refusal(const Variant *variant, int reason, const char *format, ...) {
  Refusal why = {variant, reason, ""};
  va_list values;
  va_start(values, format);
  vsnprintf(why.text, sizeof why.text, format, values);
  va_end(values);
  return why;
}

/* Where a kernel finds sequences inside a tensor by the number of a row, batch entries with lengths must be whole rows apart, and the rows
 * must be few enough for the TMA's coordinates. */
static Refusal consider_rows(const Variant *variant, const char *name, const DLTensor *plain, const View *view) {
  enum { MOST = 0x7FFF0000 };
  int64_t batch = plain->shape[0], rows = plain->shape[1], stride = view->strides[0], row = view->strides[1];
  if (batch > 1 && row == 0)
    return refusal(variant, MISALIGNED, "%s has stride 0 in dimension 1, wanted rows with places of their own", name);
  if (batch > 1 && stride % row)
    return refusal(variant, MISALIGNED, "%s has stride %lld in dimension 0, wanted a multiple of %lld, that of dimension 1", name,
                   (long long)stride, (long long)row);
  if (batch > 1 && stride / row > (MOST - rows) / batch)
    return refusal(variant, TOO_FAR, "%s has stride %lld in dimension 0, wanted all entries within 2^31 times that of dimension 1", name,
                   (long long)stride);
  return (Refusal){variant, SERVES, ""};
}

/* Kernels add rows to rows and to counts of keys, in 32 bits. */
enum { MOST_ROWS = 1000000000 };
#include "buckets.h"

static Refusal consider(const Variant *variant, const DLTensor plain[TENSORS], const View views[TENSORS]) {
  /* Vector instructions of a CPU take any address; those of a GPU that the kernels use do not. */
  int64_t step = FLASHTIR_DEVICE_TYPE == kDLCPU ? 1 : variant->alignment / (FLASHTIR_DTYPE_BITS / 8);
  for (int i = 0; i < TENSORS; ++i) {
    const char *name = kWanted[i].name;
    const View *view = &views[i];
    int past = (int)((uintptr_t)plain[i].data % variant->alignment);
    if (view->span == 0) continue;
    if (view->odd >= 0 && !variant->strided)
      return refusal(variant, STRIDED, "%s has stride %lld in dimension %d, wanted %lld", name, (long long)view->strides[view->odd],
                     view->odd - 1 + BATCH_AXES, (long long)view->compact);
    if (view->span > variant->max_elements)
      return refusal(variant, TOO_LARGE, "%s %s %s elements or more, wanted fewer", name, view->odd >= 0 ? "spans" : "has",
                     variant->beyond);
    if (i != LSE && plain[i].shape[1] > MOST_ROWS)
      return refusal(variant, TOO_LONG, "%s.shape[%d] is %lld, wanted at most 10^9", name, BATCH_AXES, (long long)plain[i].shape[1]);
    if (past)
      return refusal(variant, MISALIGNED, "%s starts %d bytes past a multiple of %d, wanted data aligned to %d bytes", name, past,
                     variant->alignment, variant->alignment);
    if (variant->whole_rows && (FLASHTIR_LENGTHS == PACKED ? i <= V : FLASHTIR_LENGTHS == KEYS && (i == K || i == V))) {
      Refusal why = consider_rows(variant, name, &plain[i], view);
      if (why.reason != SERVES) return why;
    }
    /* The generated host functions count each axis in 32 bits, and the strides of all but the batch. */
    for (int axis = 0; axis < plain[i].ndim; ++axis) {
      if (plain[i].shape[axis] > INT32_MAX)
        return refusal(variant, TOO_LONG, "%s.shape[%d] is %lld, wanted less than 2^31", name, axis - 1 + BATCH_AXES,
                       (long long)plain[i].shape[axis]);
      if (variant->strided && axis > 0 && view->strides[axis] > INT32_MAX)
        return refusal(variant, TOO_FAR, "%s has stride %lld in dimension %d, wanted less than 2^31", name,
                       (long long)view->strides[axis], axis - 1 + BATCH_AXES);
      if (view->odd >= 0 && axis < plain[i].ndim - 1 && view->strides[axis] % step)
        return refusal(variant, MISALIGNED, "%s has stride %lld in dimension %d, wanted a multiple of %lld, which is %d bytes", name,
                       (long long)view->strides[axis], axis - 1 + BATCH_AXES, (long long)step, variant->alignment);
    }
  }
  return (Refusal){variant, SERVES, ""};
}

/* The first variant that runs on the device and can serve these tensors, in the order of a bucket where there are some; NULL where an error
 * is set. `passed_over` receives why a better one could not, if one runs on the device. `only`, where given, is the one to take, whatever
 * calls it is for. Batch entries are so many, with at most so many queries. */
static const Variant *choose(const DLTensor plain[TENSORS], const View views[TENSORS], int64_t batch, int64_t queries, const Bucket *bucket,
                             const Variant *only, Refusal *passed_over) {
  char device[32];
  int capability = FLASHTIR_DEVICE_TYPE == kDLCPU ? 0 : capability_of(plain[Q].device);
  Refusal strided = {NULL, SERVES, ""};
  passed_over->reason = SERVES;
  if (capability < 0) return NULL;
  for (const Variant *next = kVariants; next < kVariants + VARIANTS; ++next) {
    const Variant *variant = BUCKETS ? &kVariants[bucket->order[next - kVariants]] : next;
    int64_t heads = plain[Q].shape[2], key_heads = plain[K].shape[2];
    if (!runs_on(variant, capability) || (only ? variant != only : !is_for(variant, batch, queries, heads, key_heads))) continue;
    Refusal why = consider(variant, plain, views);
    if (why.reason == SERVES) return variant;
    /* A kernel for contiguous tensors has a twin for views behind it: no more is to be said of it where there is another reason. */
    Refusal *kept = why.reason == STRIDED ? &strided : passed_over;
    if (kept->reason == SERVES) *kept = why;
  }
  const Refusal *told = passed_over->reason != SERVES ? passed_over : &strided;
  if (told->reason != SERVES)
    fail("ValueError", "%s: %s", told->text, kRemedies[told->reason]);
  else
    fail("ValueError", "q is on %s of compute capability %d.%d, wanted a device that runs code for %s: export for its architecture too",
         device_name(plain[Q].device, device), capability / 100, capability % 100, FLASHTIR_ARCHS);
  return NULL;
}

/* Say on stderr that a better variant was passed over, once for each reason. */
static void say_once(const Refusal *why, const Variant *used) {
  static atomic_bool said[VARIANTS][REASONS];
  if (why->reason != SERVES && !atomic_exchange(&said[why->variant - kVariants][why->reason], true))
    fprintf(stderr, FUNCTION_NAME ": %s cannot take this call (%s): using %s\n", why->variant->name, why->text, used->name);
}

/* The variant that the first argument of a call names; NULL where an error is set. */
static const Variant *variant_of_number(const TVMFFIAny *args, int32_t count) {
  if (count >= 1 && args[0].type_index == kTVMFFIInt && args[0].v_int64 >= 0 && args[0].v_int64 < VARIANTS)
    return &kVariants[args[0].v_int64];
  fail("ValueError", "the first argument is no variant of this artefact, wanted an int from 0 to %d", VARIANTS - 1);
  return NULL;
}

/* A call that has been checked: of so many batch entries, the longest with so many queries and keys. `checked` is what a kernel takes in
 * place of the call's arguments; its tensors are `plain`. */
typedef struct {
  const Variant *variant;
  Refusal passed_over;
  View views[TENSORS + EXTRAS];
  DLTensor plain[TENSORS + EXTRAS], tables[TABLES + 1];
  int64_t shapes[TENSORS][MAX_RANK], batch, longest[2];
  TVMFFIAny checked[ARGUMENTS + HEAD_SIZES];
  int negative;
} Call;

/* Fill in `call`; by the variant `only` where one is given. */
static int check_call(Call *call, const TVMFFIAny *args, int32_t count, const Variant *only) {
  const DLTensor *tensors[TENSORS];
  DLTensor *plain = call->plain;
  View *views = call->views;

  if (__TVMBackendAllocWorkspace == NULL)
    return fail("RuntimeError", "TVM's runtime was wanted, found that it was not there when this artefact was loaded: load "
                "libtvm_runtime.so (import tvm does), then the artefact");
  if (count != ARGUMENTS) return fail("TypeError", "found %d arguments, wanted %d: " FLASHTIR_CALL, (int)count, (int)ARGUMENTS);
  for (int i = 0; i < TENSORS; ++i) {
    tensors[i] = as_tensor(&args[i]);
    if (tensors[i] == NULL) return fail("TypeError", "%s is %s, wanted a tensor", kWanted[i].name, type_name(&args[i]));
  }
  for (int i = 0; i < TENSORS; ++i)
    if (check_type(&kWanted[i], tensors[i], tensors[Q]->device)) return -1;
  for (int i = 0; i < TENSORS; ++i) {
    if (check_shape(&kWanted[i], tensors[i], tensors) || check_strides(&kWanted[i], tensors[i], &views[i])) return -1;
    if (i >= FIRST_OUTPUT && i != LSE && check_places(&kWanted[i], tensors[i], &views[i])) return -1;
    call->checked[i] = (TVMFFIAny){.type_index = kTVMFFIDLTensorPtr, .v_ptr = &plain[i]};
  }
  call->batch = tensors[Q]->shape[0], call->longest[0] = tensors[Q]->shape[1], call->longest[1] = tensors[K]->shape[1];
  if (TABLES && check_lengths(&args[TABLE], &call->checked[TABLE], call->tables, tensors[Q], tensors[K], &call->batch, call->longest))
    return -1;
  for (int i = 0; i < TENSORS; ++i) plain[i] = plain_of(tensors[i], call->shapes[i], &views[i]);
  call->checked[SCALE] = args[SCALE];
  const Bucket *bucket = BUCKETS ? nearest_bucket(call->longest[0], call->longest[1]) : NULL;
  call->variant = choose(plain, views, call->batch, call->longest[0], bucket, only, &call->passed_over);
  if (call->variant == NULL || check_groups(plain[Q].shape[2], plain[K].shape[2]) || check_scale(&args[SCALE], &call->negative)) return -1;
  for (int i = 0; i < EXTRAS; ++i) {
    int place = FIRST_EXTRA + i;
    if (check_extra(&kExtras[i], &args[place], plain, &call->checked[place], &plain[TENSORS + i], &views[TENSORS + i])) return -1;
  }
  if (check_memory(plain, views) || check_tables(call->tables, plain, views)) return -1;
  return 0;
}
