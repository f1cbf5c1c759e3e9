/* The second way into an artefact: flash_attention_backward. Compiled into those that hold gradients, with what call.h says. */
#include "call.h"

/* What TVM's runtime fills in when it loads the artefact, as for its own host functions: memory of a device from a pool of this thread. */
#define RUNTIME __attribute__((weak, visibility("default")))
RUNTIME void *(*__TVMBackendAllocWorkspace)(int device_type, int device_id, uint64_t bytes, int dtype_code, int dtype_bits) = NULL;
RUNTIME int (*__TVMBackendFreeWorkspace)(int device_type, int device_id, void *data) = NULL;

/* Memory of a call, like `plain`: a tensor of whoever lends memory to this thread, as PyTorch does, which knows of streams; else of TVM's
 * pool, whose next user in this thread is expected on the same stream. */
typedef struct {
  TVMFFIObjectHandle lent;
  void *own;
} Workspace;

static int allocate(DLTensor *plain, Workspace *workspace) {
  int64_t bytes = plain->dtype.bits / 8;
  for (int axis = 0; axis < plain->ndim; ++axis) bytes *= plain->shape[axis];
  if (TVMFFIEnvGetDLPackManagedTensorAllocator() != NULL) {
    if (TVMFFIEnvTensorAlloc(plain, &workspace->lent)) return -1;
    const DLTensor *tensor = (const DLTensor *)((const char *)workspace->lent + sizeof(TVMFFIObject));
    plain->data = (char *)tensor->data + tensor->byte_offset;
    return 0;
  }
  if (__TVMBackendAllocWorkspace != NULL)
    workspace->own = __TVMBackendAllocWorkspace(plain->device.device_type, plain->device.device_id, (uint64_t)bytes, kDLFloat, 32);
  if (workspace->own == NULL)
    return fail("RuntimeError", "%lld bytes of memory were wanted for delta, found none: free some", (long long)bytes);
  plain->data = workspace->own;
  return 0;
}

static int release(const DLTensor *plain, const Workspace *workspace) {
  if (workspace->lent != NULL) return TVMFFIObjectDecRef(workspace->lent);
  return workspace->own == NULL ? 0 : __TVMBackendFreeWorkspace(plain->device.device_type, plain->device.device_id, workspace->own);
}

/* The kernels of a call, one after the other: delta, then dk and dv, then dq. Where there are no queries, keys get zeros, and where there
 * are no keys, queries do. */
static int launch(void *self, Call *call, TVMFFIAny *delta, TVMFFIAny *result) {
  HostFunction *const *functions = call->variant->functions;
  const TVMFFIAny *checked = call->checked;
  bool queries = call->longest[0] > 0 && call->views[LSE].span > 0;
  bool keys = call->longest[1] > 0 && call->views[DK].span > 0;
  enum { SHARED = 6, BEHIND = ARGUMENTS - SCALE };
  TVMFFIAny args[SHARED + 2 + BEHIND] = {checked[DOUT], checked[Q], checked[K], checked[V], checked[LSE], *delta};

  if (queries) {
    TVMFFIAny of_delta[] = {checked[DOUT], checked[OUT], *delta};
    if (functions[DELTA](self, of_delta, 3, result)) return -1;
  }
  if (keys) {
    args[SHARED] = checked[DK], args[SHARED + 1] = checked[DV];
    memcpy(args + SHARED + 2, checked + SCALE, BEHIND * sizeof *args);
    if (functions[GRADIENTS_OF_KEYS](self, args, SHARED + 2 + BEHIND, result)) return -1;
  }
  if (!queries) return 0;
  args[SHARED] = checked[DQ];
  memcpy(args + SHARED + 1, checked + SCALE, BEHIND * sizeof *args);
  return functions[GRADIENTS_OF_QUERIES](self, args, SHARED + 1 + BEHIND, result);
}

static int backward(void *self, const TVMFFIAny *args, int32_t count, TVMFFIAny *result, const Variant *only) {
  Call call = {0};
  Workspace workspace = {NULL, NULL};
  if (check_call(&call, args, count, only)) return -1;
  /* Without batch entries nothing is to be written, and without heads of keys there are none of queries. */
  if (call.batch == 0 || call.plain[K].shape[2] == 0) return 0;
  say_once(&call.passed_over, call.variant);
  /* An empty tensor gets some memory, which nobody reads. */
  const DLTensor *some = &call.plain[call.views[DQ].span ? DQ : DK];
  for (int i = 0; i < TENSORS; ++i)
    if (call.views[i].span == 0) call.plain[i].data = some->data;
  DLTensor delta = call.plain[LSE];
  if (call.views[LSE].span > 0 && allocate(&delta, &workspace)) return -1;
  TVMFFIAny argument = {.type_index = kTVMFFIDLTensorPtr, .v_ptr = &delta};
  int failed = launch(self, &call, &argument, result);
  return release(&delta, &workspace) || failed ? -1 : 0;
}

/* flash_attention_backward(dout, q, k, v, out, lse, dq, dk, dv, scale, the extras) -> None */
TVM_FFI_DLL_EXPORT int __tvm_ffi_flash_attention_backward(void *self, const TVMFFIAny *args, int32_t count, TVMFFIAny *result) {
  return backward(self, args, count, result, NULL);
}

/* flash_attention_backward_variant(number, then as above) -> None: by the variant of this number among the manifest's for gradients. */
TVM_FFI_DLL_EXPORT int __tvm_ffi_flash_attention_backward_variant(void *self, const TVMFFIAny *args, int32_t count, TVMFFIAny *result) {
  const Variant *variant = variant_of_number(args, count);
  return variant == NULL ? -1 : backward(self, args + 1, count - 1, result, variant);
}
