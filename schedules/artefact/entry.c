/* The way into an artefact. It checks every argument before anything is launched or written, chooses the first variant that can serve the
 * call on the device, and only then calls that kernel's host function, which TVM generated. Compiled into each artefact beside a generated
 * header, artefact_config.h, with these constants:
 *
 *   FLASHTIR_VARIANTS(X)       the kernels that the artefact holds, best first; X takes for each
 *                                name           for messages, such as "mma for sm_80"
 *                                kernel         symbol of the generated host function for scales of zero and above
 *                                negative       its twin for scales below zero
 *                                max_elements   most elements that a tensor may have; beyond: the number after it, as text
 *                                alignment      bytes that data must start on a multiple of
 *                                queries, tiles, rows   it is for calls with at least so many queries, and tiles of so many query rows
 *                                codes          {major, minor, exact} for each architecture of its device code, then {0}
 *   FLASHTIR_ARCHS             the architectures of all variants, for messages
 *   FLASHTIR_HEAD_DIM          channels D of q and k          FLASHTIR_VALUE_DIM    channels DV of v and out
 *   FLASHTIR_DTYPE_CODE, _BITS element type of q, k, v, out   FLASHTIR_DEVICE_TYPE  DLDeviceType of all tensors
 *   FLASHTIR_EXTRAS            the arguments behind scale, those of mask, score modification and sink: for each an Extra with a comma behind it
 *   FLASHTIR_CALL              names of all arguments, for messages
 *   FLASHTIR_MANIFEST          JSON text
 *
 * C and not C++: the artefact then needs no C++ runtime, and of TVM only a few functions of its stable C ABI.
 */
#include <math.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <tvm/ffi/c_api.h>

#include "artefact_config.h"

/* Device code of one architecture: exact, as of sm_90a or of a plan that others have no room for, runs on its own compute capability only;
 * other code also on later minors. */
typedef struct {
  int major, minor, exact;
} Code;

typedef int HostFunction(void *self, const TVMFFIAny *args, int32_t count, TVMFFIAny *result);
typedef struct {
  const char *name;
  HostFunction *kernel, *negative;
  int64_t max_elements;
  const char *beyond;
  int alignment;
  int64_t queries, tiles, rows;
  const Code *codes;
} Variant;

/* Hidden, so that the linker binds this call inside the artefact: two artefacts in one process cannot call each other's kernel, and nobody
 * reaches the kernel past the checks. */
#define DECLARE(name, kernel, negative, ...) \
  extern HostFunction kernel __attribute__((visibility("hidden"))), negative __attribute__((visibility("hidden")));
FLASHTIR_VARIANTS(DECLARE)
#define LIST(name, kernel, negative, max_elements, beyond, alignment, queries, tiles, rows, ...) \
  {name, kernel, negative, max_elements, beyond, alignment, queries, tiles, rows, (const Code[]){__VA_ARGS__}},
static const Variant kVariants[] = {FLASHTIR_VARIANTS(LIST)};
enum { VARIANTS = sizeof kVariants / sizeof *kVariants };

/* An argument of the mask, the score modification or the sink: an int from 0 up, a number, one above zero, or a tensor. Of a tensor, axes
 * holds a letter for each axis: B, H, N or M for as many as batch, heads, queries or keys, or for one. */
typedef struct {
  const char *name;
  enum { COUNT, NUMBER, POSITIVE, TENSOR } kind;
  DLDataType dtype;
  const char *axes;
} Extra;
static const Extra kExtras[] = {FLASHTIR_EXTRAS{NULL}};
enum { EXTRAS = sizeof kExtras / sizeof *kExtras - 1 };
enum { Q, K, V, OUT, LSE, TENSORS, SCALE = TENSORS, FIRST_EXTRA, ARGUMENTS = FIRST_EXTRA + EXTRAS };
enum { MAX_RANK = 4 };

/* What one dimension must be: a constant, the size of an earlier tensor's axis, or free (both zero). */
typedef struct {
  int64_t constant;
  const char *same_as;
  int tensor, axis;
} Dim;
#define FREE {0, NULL, 0, 0}
#define CONSTANT(value) {value, NULL, 0, 0}
#define SAME_AS(tensor, axis, name) {0, name, tensor, axis}

typedef struct {
  const char *name, *layout;
  DLDataType dtype;
  int rank;
  Dim dims[MAX_RANK];
} Wanted;
#define ELEMENT {FLASHTIR_DTYPE_CODE, FLASHTIR_DTYPE_BITS, 1}

static const Wanted kWanted[TENSORS] = {
    {"q", "[batch, queries, heads, head_dim]", ELEMENT, 4, {FREE, FREE, FREE, CONSTANT(FLASHTIR_HEAD_DIM)}},
    {"k", "[batch, keys, key_heads, head_dim]", ELEMENT, 4, {SAME_AS(Q, 0, "q.shape[0]"), FREE, FREE, CONSTANT(FLASHTIR_HEAD_DIM)}},
    {"v", "[batch, keys, key_heads, value_dim]", ELEMENT, 4,
     {SAME_AS(Q, 0, "q.shape[0]"), SAME_AS(K, 1, "k.shape[1]"), SAME_AS(K, 2, "k.shape[2]"), CONSTANT(FLASHTIR_VALUE_DIM)}},
    {"out", "[batch, queries, heads, value_dim]", ELEMENT, 4,
     {SAME_AS(Q, 0, "q.shape[0]"), SAME_AS(Q, 1, "q.shape[1]"), SAME_AS(Q, 2, "q.shape[2]"), CONSTANT(FLASHTIR_VALUE_DIM)}},
    {"lse", "[batch, heads, queries]", {kDLFloat, 32, 1}, 3,
     {SAME_AS(Q, 0, "q.shape[0]"), SAME_AS(Q, 2, "q.shape[2]"), SAME_AS(Q, 1, "q.shape[1]")}},
};

/* Raise an error of this kind; always -1, the ABI's "an error is set". */
static int __attribute__((format(printf, 2, 3), cold)) fail(const char *kind, const char *format, ...) {
  char text[512] = "flash_attention_forward: ";
  size_t used = strlen(text);
  va_list values;
  va_start(values, format);
  vsnprintf(text + used, sizeof text - used, format, values);
  va_end(values);
  TVMFFIErrorSetRaisedFromCStr(kind, text);
  return -1;
}

static const DLTensor *as_tensor(const TVMFFIAny *arg) {
  if (arg->type_index == kTVMFFIDLTensorPtr) return (const DLTensor *)arg->v_ptr;
  if (arg->type_index == kTVMFFITensor) return (const DLTensor *)((const char *)arg->v_obj + sizeof(TVMFFIObject));
  return NULL;
}

static const char *type_name(const TVMFFIAny *arg) {
  static const char *const plain[] = {"None", "an int", "a bool", "a float", "a plain pointer", "a dtype", "a device"};
  if (as_tensor(arg)) return "a tensor";
  if (arg->type_index >= 0 && arg->type_index < (int)(sizeof plain / sizeof *plain)) return plain[arg->type_index];
  if (arg->type_index < kTVMFFIStaticObjectBegin) return "text or bytes";
  return TVMFFIGetTypeInfo(arg->type_index)->type_key.data;
}

static const char *device_name(DLDevice device, char text[32]) {
  switch (device.device_type) {
    case kDLCPU: return "cpu";
    case kDLCUDA: snprintf(text, 32, "cuda:%d", (int)device.device_id); return text;
    default: snprintf(text, 32, "DLPack device %d:%d", (int)device.device_type, (int)device.device_id); return text;
  }
}

static const char *dtype_name(DLDataType type, char text[32]) {
  static const char *const codes[] = {"int", "uint", "float", "handle", "bfloat", "complex", "bool"};
  const char *code = type.code < sizeof codes / sizeof *codes ? codes[type.code] : "unusual type ";
  snprintf(text, 32, type.lanes == 1 ? "%s%d" : "%s%dx%d", code, type.bits, type.lanes);
  return text;
}

static int check_type(const Wanted *wanted, const DLTensor *tensor, DLDevice first) {
  char found[32], right[32];
  DLDataType type = tensor->dtype;
  if (tensor->ndim != wanted->rank)
    return fail("ValueError", "%s has %d dimensions, wanted %d: %s", wanted->name, (int)tensor->ndim, wanted->rank, wanted->layout);
  if (type.code != wanted->dtype.code || type.bits != wanted->dtype.bits || type.lanes != 1)
    return fail("TypeError", "%s has dtype %s, wanted %s", wanted->name, dtype_name(type, found), dtype_name(wanted->dtype, right));
  if (tensor->device.device_type != FLASHTIR_DEVICE_TYPE)
    return fail("ValueError", "%s is on %s, wanted a tensor on %s", wanted->name, device_name(tensor->device, found),
                FLASHTIR_DEVICE_TYPE == kDLCPU ? "the cpu" : "a cuda device");
  if (tensor->device.device_id != first.device_id)
    return fail("ValueError", "%s is on %s, wanted %s, where q is", wanted->name, device_name(tensor->device, found),
                device_name(first, right));
  return 0;
}

#define SPLIT "split the batch or the heads over several calls"

/* Shape and compact strides. `elements` receives the number of elements. */
static int check_shape(const Wanted *wanted, const DLTensor *tensor, const DLTensor *const tensors[TENSORS], int64_t *elements) {
  int64_t stride = 1;
  for (int axis = 0; axis < wanted->rank; ++axis) {
    const Dim *dim = &wanted->dims[axis];
    int64_t size = tensor->shape[axis];
    if (size < 0) return fail("ValueError", "%s.shape[%d] is %lld, wanted zero or more", wanted->name, axis, (long long)size);
    if (dim->constant && size != dim->constant)
      return fail("ValueError", "%s.shape[%d] is %lld, wanted %lld, which this artefact was built for; the layout is %s", wanted->name,
                  axis, (long long)size, (long long)dim->constant, wanted->layout);
    if (dim->same_as && size != tensors[dim->tensor]->shape[dim->axis])
      return fail("ValueError", "%s.shape[%d] is %lld, wanted %lld as %s; the layout is %s", wanted->name, axis, (long long)size,
                  (long long)tensors[dim->tensor]->shape[dim->axis], dim->same_as, wanted->layout);
  }
  *elements = 1;
  for (int axis = 0; axis < wanted->rank; ++axis)
    if (tensor->shape[axis] == 0) {
      *elements = 0;
      return 0;
    }
  for (int axis = wanted->rank - 1; axis >= 0; --axis) {
    int64_t size = tensor->shape[axis];
    /* The stride of an axis of size one moves nothing, and libraries fill it in as they like. */
    if (tensor->strides && size != 1 && tensor->strides[axis] != stride)
      return fail("ValueError", "%s has stride %lld in dimension %d, wanted %lld: pass a contiguous tensor", wanted->name,
                  (long long)tensor->strides[axis], axis, (long long)stride);
    if (__builtin_mul_overflow(stride, size, &stride))
      return fail("ValueError", "%s has 2^63 elements or more, wanted fewer: " SPLIT, wanted->name);
  }
  *elements = stride;
  return 0;
}

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

/* Counts are numbers of keys. Beyond all lengths they mean the same whatever they are; kernels add them to rows, in 32 bits. */
static int check_count(const Extra *extra, const TVMFFIAny *arg, TVMFFIAny *checked, const DLTensor plain[TENSORS]) {
  enum { TILE = 1024 }; /* more rows than a tile has, by which kernels look past the end */
  int64_t queries = plain[Q].shape[1], keys = plain[K].shape[1], most = INT32_MAX - TILE - (queries > keys ? queries : keys);
  if (arg->type_index != kTVMFFIInt) return fail("TypeError", "%s is %s, wanted an int", extra->name, type_name(arg));
  if (arg->v_int64 < 0)
    return fail("ValueError", "%s is %lld, wanted a number of keys, zero or more", extra->name, (long long)arg->v_int64);
  if (arg->v_int64 > most) checked->v_int64 = most;
  return 0;
}

static int check_number(const Extra *extra, const TVMFFIAny *arg) {
  if (arg->type_index != kTVMFFIFloat && arg->type_index != kTVMFFIInt)
    return fail("TypeError", "%s is %s, wanted a number", extra->name, type_name(arg));
  double number = arg->type_index == kTVMFFIInt ? (double)arg->v_int64 : arg->v_float64;
  if (!isfinite((float)number) || (extra->kind == POSITIVE && !((float)number > 0)))
    return fail("ValueError", "%s is %g, wanted a number%s that is finite in float32", extra->name, number,
                extra->kind == POSITIVE ? " above zero" : "");
  return 0;
}

/* Type, shape and compact strides of a tensor argument; `plain` and `elements` receive what those of the call's tensors do. */
static int check_operand(const Extra *extra, const TVMFFIAny *arg, const DLTensor *const tensors[TENSORS], DLTensor *plain, int64_t *elements) {
  static const char letters[] = "BHNM";
  static const char *const names[] = {"batch entries", "heads", "queries", "keys"};
  const int64_t sizes[] = {tensors[Q]->shape[0], tensors[Q]->shape[2], tensors[Q]->shape[1], tensors[K]->shape[1]};
  const DLTensor *tensor = as_tensor(arg);
  const Wanted wanted = {extra->name, extra->axes, extra->dtype, (int)strlen(extra->axes), {FREE, FREE, FREE, FREE}};
  if (tensor == NULL) return fail("TypeError", "%s is %s, wanted a tensor", extra->name, type_name(arg));
  if (check_type(&wanted, tensor, tensors[Q]->device)) return -1;
  for (int axis = 0; axis < wanted.rank; ++axis) {
    int which = (int)(strchr(letters, extra->axes[axis]) - letters);
    if (tensor->shape[axis] != 1 && tensor->shape[axis] != sizes[which])
      return fail("ValueError", "%s.shape[%d] is %lld, wanted 1 or %lld, the number of %s", extra->name, axis, (long long)tensor->shape[axis],
                  (long long)sizes[which], names[which]);
  }
  if (check_shape(&wanted, tensor, tensors, elements)) return -1;
  if (*elements > INT32_MAX) return fail("ValueError", "%s has 2^31 elements or more, wanted fewer: " SPLIT, extra->name);
  *plain = *tensor;
  plain->data = *elements ? (char *)tensor->data + tensor->byte_offset : (char *)tensors[Q]->data + tensors[Q]->byte_offset;
  plain->byte_offset = 0;
  plain->strides = NULL;
  return 0;
}

static int64_t bytes_of(const DLTensor *tensor, int64_t elements) { return elements * (tensor->dtype.bits / 8); }

static int overlaps(const DLTensor *a, int64_t a_elements, const DLTensor *b, int64_t b_elements) {
  uintptr_t a_start = (uintptr_t)a->data, b_start = (uintptr_t)b->data;
  return a_elements && b_elements && a_start < b_start + bytes_of(b, b_elements) && b_start < a_start + bytes_of(a, a_elements);
}

static int check_memory(const DLTensor *plain, const int64_t *elements) {
  for (int i = 0; i < TENSORS + EXTRAS; ++i) {
    const char *name = i < TENSORS ? kWanted[i].name : kExtras[i - TENSORS].name;
    if (elements[i] == 0) continue;
    if (plain[i].data == NULL) return fail("ValueError", "%s has no data, wanted a pointer to its elements", name);
    for (int output = OUT; output <= LSE; ++output)
      if ((i < output || i >= TENSORS) && overlaps(&plain[output], elements[output], &plain[i], elements[i]))
        return fail("ValueError", "%s shares memory with %s, wanted outputs of their own", kWanted[output].name, name);
  }
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
  static const TVMFFIByteArray name = {"runtime.GetDeviceAttr", sizeof "runtime.GetDeviceAttr" - 1};
  bool kept = device.device_id >= 0 && device.device_id < DEVICES;
  if (kept && known[device.device_id]) return known[device.device_id];

  TVMFFIObjectHandle get = NULL;
  TVMFFIAny args[] = {{.type_index = kTVMFFIInt, .v_int64 = device.device_type}, {.type_index = kTVMFFIInt, .v_int64 = device.device_id},
                      {.type_index = kTVMFFIInt, .v_int64 = COMPUTE_VERSION}};
  TVMFFIAny answer = {.type_index = kTVMFFINone};
  if (TVMFFIFunctionGetGlobal(&name, &get)) return -1;
  if (get == NULL) return fail("RuntimeError", "TVM's runtime was wanted, found no function %s: load libtvm_runtime.so first", name.data);
  int failed = TVMFFIFunctionCall(get, args, 3, &answer);
  TVMFFIObjectDecRef(get);
  if (failed) return -1;

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

/* Whether a call has the queries that a variant is for: enough rows for its tiles, and tiles for all multiprocessors. The sizes of an empty
 * tensor can have any product. */
static bool is_for(const Variant *variant, const DLTensor *q) {
  double tiles = ceil((double)q->shape[1] / (double)variant->rows);
  return q->shape[1] >= variant->queries && tiles * (double)q->shape[0] * (double)q->shape[2] >= (double)variant->tiles;
}

/* Why a variant cannot serve a call, where the device is not the reason. */
enum { SERVES, TOO_LARGE, TOO_LONG, MISALIGNED, REASONS };
static const char *const kRemedies[REASONS] = {"", SPLIT, "split it over several calls", "pass a copy"};
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

static Refusal consider(const Variant *variant, const DLTensor plain[TENSORS], const int64_t elements[TENSORS]) {
  for (int i = 0; i < TENSORS; ++i) {
    const char *name = kWanted[i].name;
    int past = (int)((uintptr_t)plain[i].data % variant->alignment);
    if (elements[i] == 0) continue;
    if (elements[i] > variant->max_elements)
      return refusal(variant, TOO_LARGE, "%s has %s elements or more, wanted fewer", name, variant->beyond);
    if (past)
      return refusal(variant, MISALIGNED, "%s starts %d bytes past a multiple of %d, wanted data aligned to %d bytes", name, past,
                     variant->alignment, variant->alignment);
    /* The generated host functions count each axis in 32 bits. */
    for (int axis = 0; axis < kWanted[i].rank; ++axis)
      if (plain[i].shape[axis] > INT32_MAX)
        return refusal(variant, TOO_LONG, "%s.shape[%d] is %lld, wanted less than 2^31", name, axis, (long long)plain[i].shape[axis]);
  }
  return (Refusal){variant, SERVES, ""};
}

/* The first variant that runs on the device and can serve these tensors; NULL where an error is set. `passed_over` receives why a better
 * one could not, if one runs on the device. `only`, where given, is the one to take, whatever calls it is for. */
static const Variant *choose(const DLTensor plain[TENSORS], const int64_t elements[TENSORS], const Variant *only, Refusal *passed_over) {
  char device[32];
  int capability = FLASHTIR_DEVICE_TYPE == kDLCPU ? 0 : capability_of(plain[Q].device);
  passed_over->reason = SERVES;
  if (capability < 0) return NULL;
  for (const Variant *variant = kVariants; variant < kVariants + VARIANTS; ++variant) {
    if (!runs_on(variant, capability) || (only ? variant != only : !is_for(variant, &plain[Q]))) continue;
    Refusal why = consider(variant, plain, elements);
    if (why.reason == SERVES) return variant;
    if (passed_over->reason == SERVES) *passed_over = why;
  }
  if (passed_over->reason != SERVES)
    fail("ValueError", "%s: %s", passed_over->text, kRemedies[passed_over->reason]);
  else
    fail("ValueError", "q is on %s of compute capability %d.%d, wanted a device that runs code for %s: export for its architecture too",
         device_name(plain[Q].device, device), capability / 100, capability % 100, FLASHTIR_ARCHS);
  return NULL;
}

/* Say on stderr that a better variant was passed over, once for each reason. */
static void say_once(const Refusal *why, const Variant *used) {
  static atomic_bool said[VARIANTS][REASONS];
  if (why->reason != SERVES && !atomic_exchange(&said[why->variant - kVariants][why->reason], true))
    fprintf(stderr, "flash_attention_forward: %s cannot take this call (%s): using %s\n", why->variant->name, why->text, used->name);
}

static int forward(void *self, const TVMFFIAny *args, int32_t count, TVMFFIAny *result, const Variant *only) {
  const DLTensor *tensors[TENSORS];
  int64_t elements[TENSORS + EXTRAS] = {0};
  DLTensor plain[TENSORS + EXTRAS];
  TVMFFIAny checked[ARGUMENTS];
  Refusal passed_over;
  int negative = 0;

  if (count != ARGUMENTS) return fail("TypeError", "found %d arguments, wanted %d: " FLASHTIR_CALL, (int)count, (int)ARGUMENTS);
  for (int i = 0; i < TENSORS; ++i) {
    tensors[i] = as_tensor(&args[i]);
    if (tensors[i] == NULL) return fail("TypeError", "%s is %s, wanted a tensor", kWanted[i].name, type_name(&args[i]));
    if (check_type(&kWanted[i], tensors[i], tensors[Q]->device)) return -1;
    if (check_shape(&kWanted[i], tensors[i], tensors, &elements[i])) return -1;
    /* The kernel's host function gets the plainest form of each tensor: no offset, and no strides, which says compact. It would refuse an
     * odd stride of an axis of size one, and the missing data of an empty tensor. */
    plain[i] = *tensors[i];
    plain[i].data = (char *)tensors[i]->data + tensors[i]->byte_offset;
    plain[i].byte_offset = 0;
    plain[i].strides = NULL;
    checked[i] = (TVMFFIAny){.type_index = kTVMFFIDLTensorPtr, .v_ptr = &plain[i]};
  }
  checked[SCALE] = args[SCALE];
  const Variant *variant = choose(plain, elements, only, &passed_over);
  if (variant == NULL || check_groups(tensors[Q]->shape[2], tensors[K]->shape[2]) || check_scale(&args[SCALE], &negative)) return -1;
  for (int i = 0; i < EXTRAS; ++i) {
    const Extra *extra = &kExtras[i];
    const TVMFFIAny *arg = &args[FIRST_EXTRA + i];
    checked[FIRST_EXTRA + i] = *arg;
    if (extra->kind == COUNT && check_count(extra, arg, &checked[FIRST_EXTRA + i], plain)) return -1;
    if ((extra->kind == NUMBER || extra->kind == POSITIVE) && check_number(extra, arg)) return -1;
    if (extra->kind != TENSOR) continue;
    if (check_operand(extra, arg, tensors, &plain[TENSORS + i], &elements[TENSORS + i])) return -1;
    checked[FIRST_EXTRA + i] = (TVMFFIAny){.type_index = kTVMFFIDLTensorPtr, .v_ptr = &plain[TENSORS + i]};
  }
  if (check_memory(plain, elements)) return -1;
  if (elements[LSE] == 0) return 0;
  if (elements[K] == 0) plain[K].data = plain[V].data = plain[Q].data;
  say_once(&passed_over, variant);
  return (negative ? variant->negative : variant->kernel)(self, checked, ARGUMENTS, result);
}

/* flash_attention_forward(q, k, v, out, lse, scale, the extras) -> None */
TVM_FFI_DLL_EXPORT int __tvm_ffi_flash_attention_forward(void *self, const TVMFFIAny *args, int32_t count, TVMFFIAny *result) {
  return forward(self, args, count, result, NULL);
}

/* flash_attention_forward_variant(number, then as above) -> None: by the variant of this number in the manifest, from 0 on, so that each can
 * be checked on calls which the choice would give to another. */
TVM_FFI_DLL_EXPORT int __tvm_ffi_flash_attention_forward_variant(void *self, const TVMFFIAny *args, int32_t count, TVMFFIAny *result) {
  if (count < 1 || args[0].type_index != kTVMFFIInt || args[0].v_int64 < 0 || args[0].v_int64 >= VARIANTS)
    return fail("ValueError", "the first argument is no variant of this artefact, wanted an int from 0 to %d", VARIANTS - 1);
  return forward(self, args + 1, count - 1, result, &kVariants[args[0].v_int64]);
}

/* flash_attention_manifest() -> JSON text */
TVM_FFI_DLL_EXPORT int __tvm_ffi_flash_attention_manifest(void *self, const TVMFFIAny *args, int32_t count, TVMFFIAny *result) {
  (void)self, (void)args, (void)count;
  TVMFFIByteArray text = {FLASHTIR_MANIFEST, sizeof FLASHTIR_MANIFEST - 1};
  return TVMFFIStringFromByteArray(&text, result);
}

/* Code that calls the module's main function, as TVM lets it, gets the checked one; the generated one is weak and yields. */
TVM_FFI_DLL_EXPORT int __tvm_ffi_main(void *, const TVMFFIAny *, int32_t, TVMFFIAny *)
    __attribute__((alias("__tvm_ffi_flash_attention_forward")));
