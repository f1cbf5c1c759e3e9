/* The second way into an artefact: flash_attention_backward. Compiled into those that hold gradients, with what call.h says. */
#include "call.h"

/* Filled in as __TVMBackendAllocWorkspace is. */
RUNTIME int (*__TVMBackendFreeWorkspace)(int device_type, int device_id, void *data) = NULL;

/* A tensor of a call's own: lent by whoever lends memory to this thread, as PyTorch does, which knows of streams; else of TVM's pool, whose
 * next user in this thread is expected on the same stream. */
typedef struct {
  DLTensor plain;
  TVMFFIAny argument;
  TVMFFIObjectHandle lent;
  void *own;
} Workspace;

static int allocate(Workspace *workspace, const char *name) {
  DLTensor *plain = &workspace->plain;
  int64_t bytes = plain->dtype.bits / 8;
  for (int axis = 0; axis < plain->ndim; ++axis) bytes *= plain->shape[axis];
  workspace->argument = (TVMFFIAny){.type_index = kTVMFFIDLTensorPtr, .v_ptr = plain};
  if (bytes == 0) return 0;
  if (TVMFFIEnvGetDLPackManagedTensorAllocator() != NULL) {
    if (TVMFFIEnvTensorAlloc(plain, &workspace->lent)) return -1;
    const DLTensor *tensor = (const DLTensor *)((const char *)workspace->lent + sizeof(TVMFFIObject));
    plain->data = (char *)tensor->data + tensor->byte_offset;
    return 0;
  }
  workspace->own = __TVMBackendAllocWorkspace(plain->device.device_type, plain->device.device_id, (uint64_t)bytes, kDLFloat, 32);
  if (workspace->own == NULL) return fail("RuntimeError", "%lld bytes were wanted for %s, found no memory: free some", (long long)bytes, name);
  plain->data = workspace->own;
  return 0;
}

/* What ends with its variable, also where TVM's pool has no memory: it says so by a C++ exception, which passes through here. */
#define RELEASED __attribute__((cleanup(release)))
static void release(Workspace *workspace) {
  const DLDevice *device = &workspace->plain.device;
  if (workspace->lent != NULL) TVMFFIObjectDecRef(workspace->lent);
  if (workspace->own != NULL) __TVMBackendFreeWorkspace(device->device_type, device->device_id, workspace->own);
}

/* Call a function with some arguments of its own, and with as many of those behind the tensors of the call as it takes. */
enum { BEHIND = ARGUMENTS - SCALE, MOST_OWN = 10 };
static int invoke(void *self, const Call *call, Function function, const TVMFFIAny *own, int count, int behind, TVMFFIAny *result) {
  TVMFFIAny args[MOST_OWN + BEHIND];
  memcpy(args, own, count * sizeof *args);
  memcpy(args + count, call->checked + SCALE, behind * sizeof *args);
  return call->variant->functions[function](self, args, count + behind, result);
}

/* The kernels of a call, one after the other: delta, then dk and dv, by one or by one each, then dq; or delta and zeros, then dk, dv and sums
 * of dq, then dq. Where there are no queries, keys get zeros, and where there are no keys, queries do. */
static int launch(void *self, const Call *call, const TVMFFIAny *dlse, const TVMFFIAny *delta, const TVMFFIAny *sums, const TVMFFIAny *turns,
                  TVMFFIAny *result) {
  const TVMFFIAny *it = call->checked;
  bool adds = call->variant->sum_rows > 0, apart = call->variant->functions[GRADIENTS_OF_VALUES] != NULL, turn = call->variant->turns;
  bool queries = call->longest[0] > 0 && call->views[LSE].span > 0;
  bool keys = call->longest[1] > 0 && call->views[DK].span > 0;
  TVMFFIAny of_delta[] = {it[DOUT], it[OUT], it[LSE], *delta}, through_lse[] = {it[DOUT], it[OUT], it[LSE], *dlse, *delta};
  TVMFFIAny of_keys[] = {it[DOUT], it[Q], it[K], it[V], it[LSE], *delta, it[DK], it[DV]};
  TVMFFIAny of_values[] = {it[DOUT], it[Q], it[K], it[V], it[LSE], *delta, it[DV]};
  TVMFFIAny of_all[MOST_OWN] = {it[DOUT], it[Q], it[K], it[V], it[LSE], *delta, *sums}, zeros[] = {*sums, *turns};
  TVMFFIAny of_queries[] = {it[DOUT], it[Q], it[K], it[V], it[LSE], *delta, it[DQ]};
  TVMFFIAny of_sums[] = {*sums, it[DQ]};

  if (queries && (dlse->type_index == kTVMFFINone ? invoke(self, call, DELTA, of_delta, 4, 0, result)
                                                  : invoke(self, call, DELTA_THROUGH_LSE, through_lse, 5, 0, result)))
    return -1;
  /* Keys without queries take their turn at a tile that nobody reads. */
  if ((queries || (keys && turn)) && adds && invoke(self, call, ZEROS, zeros, turn ? 2 : 1, 0, result)) return -1;
  if (keys && apart && invoke(self, call, GRADIENTS_OF_VALUES, of_values, 7, BEHIND, result)) return -1;
  int all = 7;
  if (turn) of_all[all++] = *turns;
  of_all[all++] = it[DK], of_all[all++] = it[DV];
  if (keys && invoke(self, call, GRADIENTS_OF_KEYS, adds ? of_all : of_keys, adds ? all : apart ? 7 : 8, BEHIND, result)) return -1;
  if (!queries) return 0;
  return adds ? invoke(self, call, GRADIENTS_OF_QUERIES, of_sums, 2, BEHIND, result)
              : invoke(self, call, GRADIENTS_OF_QUERIES, of_queries, 7, BEHIND, result);
}

/* The gradient of lse, which may follow all other arguments: like lse, or None. `checked` and `plain` receive what the kernel gets. */
static int check_dlse(const TVMFFIAny *arg, const Call *call, TVMFFIAny *checked, DLTensor *plain) {
  Wanted wanted = kWanted[LSE];
  View view;
  *checked = (TVMFFIAny){.type_index = kTVMFFINone};
  wanted.name = "dlse";
  if (arg->type_index == kTVMFFINone) return 0;
  const DLTensor *tensor = as_tensor(arg), *lse = &call->plain[LSE];
  if (tensor == NULL) return fail("TypeError", "dlse is %s, wanted a tensor or None", type_name(arg));
  if (check_type(&wanted, tensor, lse->device) || check_strides(&wanted, tensor, &view)) return -1;
  for (int axis = 0; axis < wanted.rank; ++axis)
    if (tensor->shape[axis] != lse->shape[axis + 1 - BATCH_AXES])
      return fail("ValueError", "dlse.shape[%d] is %lld, wanted %lld as lse.shape[%d]", axis, (long long)tensor->shape[axis],
                  (long long)lse->shape[axis + 1 - BATCH_AXES], axis);
  *plain = *lse;
  plain->data = (char *)tensor->data + tensor->byte_offset;
  if (view.span && plain->data == NULL) return fail("ValueError", "dlse has no data, wanted a pointer to its elements");
  for (int output = FIRST_OUTPUT; output < TENSORS; ++output)
    if (check_apart(output, call->plain, call->views, plain, NULL, view.span, "dlse")) return -1;
  *checked = (TVMFFIAny){.type_index = kTVMFFIDLTensorPtr, .v_ptr = plain};
  return 0;
}

/* The sums of dq, from dq: [batch, heads, tiles, elements of a tile], with tiles of `sum_rows` rows as te_defs.fused_backward counts them. */
static void describe_sums(const Call *call, DLTensor *sums, DLDataType dtype, int64_t shape[4]) {
  int64_t rows = call->variant->sum_rows > 0 ? call->variant->sum_rows : 1, queries = sums->shape[1];
  int64_t tiles = FLASHTIR_LENGTHS == PACKED ? queries / rows + call->batch : (queries + rows - 1) / rows;
  memcpy(shape, (int64_t[]){sums->shape[0], sums->shape[2], tiles > 0 ? tiles : 1, rows * FLASHTIR_HEAD_DIM}, 4 * sizeof *shape);
  sums->dtype = dtype, sums->shape = shape, sums->strides = NULL;
}

#include "operands.h"

static int backward(void *self, const TVMFFIAny *args, int32_t count, TVMFFIAny *result, const Variant *only) {
  Call call = {0};
  TVMFFIAny dlse;
  DLTensor plain_dlse;
  Output operands[OPERANDS + 1] = {{.given = false}};
  int optional = count - ARGUMENTS;
  if (optional > 1 + OPERANDS)
    return fail("TypeError", "found %d arguments, wanted %d to %d: " FLASHTIR_CALL ", " FLASHTIR_OPTIONAL "; gradients of more tensors are "
                "made by artefacts that were exported with them", (int)count, (int)ARGUMENTS, (int)ARGUMENTS + 1 + OPERANDS);
  if (check_call(&call, args, optional > 0 ? ARGUMENTS : count, only)) return -1;
  if (check_dlse(optional > 0 ? &args[ARGUMENTS] : &(TVMFFIAny){.type_index = kTVMFFINone}, &call, &dlse, &plain_dlse)) return -1;
  for (int i = 0; i < optional - 1; ++i)
    if (check_operand_gradient(i, &args[ARGUMENTS + 1 + i], &call, &dlse, operands)) return -1;
  say_once(&call.passed_over, call.variant);
  /* An empty tensor gets some memory, which nobody reads; where all outputs are empty nothing is to be done. */
  void *some = memory_of_outputs(&call, operands);
  if (some == NULL) return 0;
  for (int i = 0; i < TENSORS + EXTRAS; ++i)
    if (call.views[i].span == 0) call.plain[i].data = some;
  for (int i = 0; i < TABLES; ++i)
    if (call.tables[i].data == NULL) call.tables[i].data = some;
  for (int i = 0; i < TENSORS && call.variant->strided; ++i)
    if (i != LSE) call.plain[i].strides = call.views[i].strides;
  Workspace RELEASED delta = {.plain = call.plain[LSE]}, sums = {.plain = call.plain[DQ]};
  int64_t shape[4];
  describe_sums(&call, &sums.plain, delta.plain.dtype, shape);
  Workspace RELEASED turns = {.plain = sums.plain};  /* [batch, heads, tiles] */
  turns.plain.ndim = 3, turns.plain.dtype = (DLDataType){kDLInt, 32, 1};
  int failed = allocate(&delta, "delta") || (call.variant->sum_rows > 0 && allocate(&sums, "sums of dq")) ||
               (call.variant->turns && allocate(&turns, "turns at sums of dq")) ||
               launch(self, &call, &dlse, &delta.argument, &sums.argument, &turns.argument, result);
  for (int i = 0; i < OPERANDS && !failed; ++i) failed = launch_operand(self, &call, i, &operands[i], &delta.argument, result);
  return failed ? -1 : 0;
}

/* flash_attention_backward(dout, q, k, v, out, lse, dq, dk, dv, scale, the extras[, dlse[, gradients of some extras]]) -> None */
EXPORTED() {
  return backward(self, args, count, result, NULL);
}

/* flash_attention_backward_variant(number, then as above) -> None: by the variant of this number among the manifest's for gradients. */
EXPORTED(_variant) {
  const Variant *variant = variant_of_number(args, count);
  return variant == NULL ? -1 : backward(self, args + 1, count - 1, result, variant);
}

#if FLASHTIR_BUCKET_COUNT
/* flash_attention_backward_bucket(q_len, kv_len) -> number of a bucket in the manifest, among those for gradients, from 0 on. */
EXPORTED(_bucket) {
  (void)self;
  return tell_bucket(args, count, result);
}
#endif
