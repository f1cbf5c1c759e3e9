/* The tensors of a call: what they must be, and the checks that look at nothing else. A part of call.h, which says what the constants of
 * artefact_config.h are. Every check returns 0, or -1 where it has set an error. */
#define SPLIT "split the batch or the heads over several calls"

#define TEXT_OF(token) #token
#define TEXT(token) TEXT_OF(token)
#define FUNCTION_NAME TEXT(FLASHTIR_FUNCTION)

#if FLASHTIR_BACKWARD
enum { DOUT, Q, K, V, OUT, LSE, DQ, DK, DV, TENSORS, FIRST_OUTPUT = DQ };
#else
enum { Q, K, V, OUT, LSE, TENSORS, FIRST_OUTPUT = OUT };
#endif
enum { MAX_RANK = 4 };
/* FLASHTIR_LENGTHS: who says how many rows batch entries have. Packed tensors have no batch axis; kernels get one of size one. */
enum { UNIFORM, KEYS, PACKED };
enum { BATCH_AXES = FLASHTIR_LENGTHS == PACKED ? 0 : 1 };

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

/* What one dimension must be: a constant, or the size of some tensor's axis; free where both are zero. */
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
  bool contiguous; /* whether views with strides are refused */
} Wanted;
#define ELEMENT {FLASHTIR_DTYPE_CODE, FLASHTIR_DTYPE_BITS, 1}

/* Axes and sizes of tensors with rows of queries, and of keys. */
#if FLASHTIR_LENGTHS == 2
#define OF_QUERIES(name, channels, C) \
  {name, "[queries, heads, " channels "]", ELEMENT, 3, {SAME_AS(Q, 0, "q.shape[0]"), SAME_AS(Q, 1, "q.shape[1]"), CONSTANT(C)}}
#define OF_KEYS(name, channels, C) \
  {name, "[keys, key_heads, " channels "]", ELEMENT, 3, {SAME_AS(K, 0, "k.shape[0]"), SAME_AS(K, 1, "k.shape[1]"), CONSTANT(C)}}
#define OF_ROWS {"lse", "[heads, queries]", {kDLFloat, 32, 1}, 2, {SAME_AS(Q, 1, "q.shape[1]"), SAME_AS(Q, 0, "q.shape[0]")}, true}
#else
#define OF_QUERIES(name, channels, C) \
  {name, "[batch, queries, heads, " channels "]", ELEMENT, 4, \
   {SAME_AS(Q, 0, "q.shape[0]"), SAME_AS(Q, 1, "q.shape[1]"), SAME_AS(Q, 2, "q.shape[2]"), CONSTANT(C)}}
#define OF_KEYS(name, channels, C) \
  {name, "[batch, keys, key_heads, " channels "]", ELEMENT, 4, \
   {SAME_AS(Q, 0, "q.shape[0]"), SAME_AS(K, 1, "k.shape[1]"), SAME_AS(K, 2, "k.shape[2]"), CONSTANT(C)}}
#define OF_ROWS \
  {"lse", "[batch, heads, queries]", {kDLFloat, 32, 1}, 3, \
   {SAME_AS(Q, 0, "q.shape[0]"), SAME_AS(Q, 2, "q.shape[2]"), SAME_AS(Q, 1, "q.shape[1]")}, true}
#endif
static const Wanted kWanted[TENSORS] = {
    [Q] = OF_QUERIES("q", "head_dim", FLASHTIR_HEAD_DIM), /* the same as itself: free */
    [K] = OF_KEYS("k", "head_dim", FLASHTIR_HEAD_DIM),
    [V] = OF_KEYS("v", "value_dim", FLASHTIR_VALUE_DIM),
    [OUT] = OF_QUERIES("out", "value_dim", FLASHTIR_VALUE_DIM),
    [LSE] = OF_ROWS,
#if FLASHTIR_BACKWARD
    [DOUT] = OF_QUERIES("dout", "value_dim", FLASHTIR_VALUE_DIM),
    [DQ] = OF_QUERIES("dq", "head_dim", FLASHTIR_HEAD_DIM),
    [DK] = OF_KEYS("dk", "head_dim", FLASHTIR_HEAD_DIM),
    [DV] = OF_KEYS("dv", "value_dim", FLASHTIR_VALUE_DIM),
#endif
};

/* Raise an error of this kind; always -1, the ABI's "an error is set". */
static int __attribute__((format(printf, 2, 3), cold)) fail(const char *kind, const char *format, ...) {
  char text[512 + sizeof FUNCTION_NAME] = FUNCTION_NAME ": ";
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

static int check_shape(const Wanted *wanted, const DLTensor *tensor, const DLTensor *const tensors[TENSORS]) {
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
  return 0;
}

/* Where the elements of a tensor lie: strides in elements, and how many elements there are from the first to the last in memory, 0 for an
 * empty tensor. odd is the last axis whose stride is not that of a contiguous tensor, which `compact` is; -1 where there is none. */
typedef struct {
  int64_t strides[MAX_RANK], span, compact;
  int odd;
} View;

static int check_strides(const Wanted *wanted, const DLTensor *tensor, View *view) {
  int channel = wanted->rank - 1;
  int64_t compact = 1;
  bool empty = false;
  *view = (View){.odd = -1};
  for (int axis = 0; axis < wanted->rank; ++axis) empty |= tensor->shape[axis] == 0;
  for (int axis = channel; axis >= 0; --axis) {
    int64_t size = tensor->shape[axis];
    /* The stride of an axis of size one, or of an empty tensor, moves nothing, and libraries fill it in as they like: kernels get one that
     * every piece of hardware takes. */
    bool moves = size > 1 && !empty;
    int64_t stride = !moves ? (axis == channel ? 1 : tensor->shape[channel]) : tensor->strides ? tensor->strides[axis] : compact;
    view->strides[axis] = stride;
    if (stride < 0)
      return fail("ValueError", "%s has stride %lld in dimension %d, wanted none below zero: pass a copy", wanted->name, (long long)stride,
                  axis);
    if (moves && stride != compact && view->odd < 0) view->odd = axis, view->compact = compact;
    if (!empty && __builtin_mul_overflow(compact, size, &compact))
      return fail("ValueError", "%s has 2^63 elements or more, wanted fewer: " SPLIT, wanted->name);
  }
  for (int axis = 0; axis < wanted->rank && !empty; ++axis) {
    int64_t reach;
    if (__builtin_mul_overflow(tensor->shape[axis] - 1, view->strides[axis], &reach) ||
        __builtin_add_overflow(view->span, reach + (axis == 0), &view->span))
      return fail("ValueError", "%s spans 2^63 elements or more, wanted fewer: " SPLIT, wanted->name);
  }
  if (view->odd == channel || (view->odd >= 0 && wanted->contiguous))
    return fail("ValueError", "%s has stride %lld in dimension %d, wanted %lld: pass a %s", wanted->name,
                (long long)view->strides[view->odd], view->odd, (long long)view->compact,
                wanted->contiguous ? "contiguous tensor" : "tensor whose channels are neighbours");
  return 0;
}

/* Whether the elements of an output have places of their own: from the smallest stride up, each must lead past all that those before it
 * reach. (Other views may do without overlap, too; nobody makes them.) */
static int check_places(const Wanted *wanted, const DLTensor *tensor, const View *view) {
  bool seen[MAX_RANK] = {false};
  int64_t reach = 0;
  for (int count = 0; count < wanted->rank && view->span; ++count) {
    int axis = -1;
    for (int other = 0; other < wanted->rank; ++other)
      if (!seen[other] && (axis < 0 || view->strides[other] < view->strides[axis])) axis = other;
    seen[axis] = true;
    if (tensor->shape[axis] <= 1) continue;
    if (view->strides[axis] <= reach)
      return fail("ValueError", "%s has stride %lld in dimension %d, wanted more than %lld, so that no two elements share memory",
                  wanted->name, (long long)view->strides[axis], axis, (long long)reach);
    reach += (tensor->shape[axis] - 1) * view->strides[axis];
  }
  return 0;
}

static int64_t bytes_of(const DLTensor *tensor, int64_t elements) { return elements * (tensor->dtype.bits / 8); }

/* Bytes of a view that lie side by side, again and again at a distance that is a multiple of `period`, which receives what divides all its
 * strides beyond them, and what it held. */
static int64_t run_of(const DLTensor *plain, const View *view, int64_t *period) {
  int64_t run = 1;
  for (int axis = plain->ndim - 1; axis >= 0; --axis) {
    int64_t size = plain->shape[axis], stride = view->strides[axis];
    if (size == 1) continue;
    if (stride == run) {
      run *= size;
      continue;
    }
    for (int64_t a = bytes_of(plain, stride), b; a; a = b) b = *period % a, *period = a;
  }
  return bytes_of(plain, run);
}

/* Whether two views are slices of one tensor that never meet, such as keys and values of one projection. */
static bool are_slices(const DLTensor *a, const View *view_a, const DLTensor *b, const View *view_b) {
  int64_t period = 0, run_a = run_of(a, view_a, &period), run_b = run_of(b, view_b, &period);
  if (period == 0) return false;
  int64_t ahead = (int64_t)((uintptr_t)b->data % period) - (int64_t)((uintptr_t)a->data % period);
  ahead += ahead < 0 ? period : 0;
  return ahead >= run_a && period - ahead >= run_b;
}

/* Whether one of two tensors lies between the first and the last element of the other. */
static bool meet(const DLTensor *a, int64_t span_a, const DLTensor *b, int64_t span_b) {
  uintptr_t start_a = (uintptr_t)a->data, start_b = (uintptr_t)b->data;
  return span_a && span_b && start_a < start_b + bytes_of(b, span_b) && start_b < start_a + bytes_of(a, span_a);
}

static int __attribute__((cold)) fail_apart(const char *output, const char *other) {
  return fail("ValueError", "%s shares memory with %s, wanted outputs of their own", output, other);
}

/* An output shares no memory with another tensor; where they meet, they count as sharing, unless they are slices. `span` and `view` are
 * those of the other; a tensor without a view is contiguous. */
static int check_apart(int output, const DLTensor *plain, const View *views, const DLTensor *other, const View *view, int64_t span,
                       const char *name) {
  if (meet(&plain[output], views[output].span, other, span) && !(view && are_slices(&plain[output], &views[output], other, view)))
    return fail_apart(kWanted[output].name, name);
  return 0;
}

/* Tensors have data, and outputs share no memory with others. */
static int check_memory(const DLTensor *plain, const View *views) {
  for (int i = 0; i < TENSORS + EXTRAS; ++i) {
    const char *name = i < TENSORS ? kWanted[i].name : kExtras[i - TENSORS].name;
    if (views[i].span == 0) continue;
    if (plain[i].data == NULL) return fail("ValueError", "%s has no data, wanted a pointer to its elements", name);
    for (int output = FIRST_OUTPUT; output < TENSORS; ++output)
      if ((i < output || i >= TENSORS) && check_apart(output, plain, views, &plain[i], i < TENSORS ? &views[i] : NULL, views[i].span, name))
        return -1;
  }
  return 0;
}

/* What the kernel's host function gets of a tensor: no offset, and no strides, which says compact, until somebody puts them in. It would
 * refuse an odd stride of an axis of size one, and the missing data of an empty tensor. A packed tensor becomes the only batch entry of
 * one with `shape`, and its view likewise. */
static DLTensor plain_of(const DLTensor *tensor, int64_t shape[MAX_RANK], View *view) {
  DLTensor plain = *tensor;
  plain.data = (char *)tensor->data + tensor->byte_offset;
  plain.byte_offset = 0;
  plain.strides = NULL;
  if (BATCH_AXES) return plain;
  memcpy(shape + 1, tensor->shape, tensor->ndim * sizeof *shape);
  memmove(view->strides + 1, view->strides, tensor->ndim * sizeof *shape);
  shape[0] = 1, view->strides[0] = tensor->shape[tensor->ndim - 1];
  view->odd += view->odd >= 0;
  plain.shape = shape, ++plain.ndim;
  return plain;
}
