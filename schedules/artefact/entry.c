/* The way into an artefact: flash_attention_forward. Compiled into each artefact with what call.h says, once for each of its workloads. */
#include "call.h"

/* Number of further arguments of a kernel whose tiles the heads of a group share, and these: heads and queries of a tile, and tiles that a
 * query takes in a group. */
static int pack(const Variant *variant, const DLTensor plain[TENSORS], TVMFFIAny further[HEAD_SIZES]) {
  if (!variant->packed) return 0;
  int64_t key_heads = plain[K].shape[2], group = key_heads ? plain[Q].shape[2] / key_heads : 1;
  int64_t heads = group < variant->rows ? group : variant->rows;
  int64_t sizes[HEAD_SIZES] = {heads, variant->rows / heads, (group + heads - 1) / heads};
  for (int i = 0; i < HEAD_SIZES; ++i) further[i] = (TVMFFIAny){.type_index = kTVMFFIInt, .v_int64 = sizes[i]};
  return HEAD_SIZES;
}

static int forward(void *self, const TVMFFIAny *args, int32_t count, TVMFFIAny *result, const Variant *only) {
  Call call = {0};
  if (check_call(&call, args, count, only)) return -1;
  DLTensor *plain = call.plain;
  if (call.views[LSE].span == 0 || call.batch == 0 || call.longest[0] == 0) return 0;
  if (call.views[K].span == 0) plain[K].data = plain[V].data = plain[Q].data;
  for (int i = Q; i <= OUT && call.variant->strided; ++i) plain[i].strides = call.views[i].strides;
  say_once(&call.passed_over, call.variant);
  int further = pack(call.variant, plain, call.checked + ARGUMENTS);
  HostFunction *kernel = call.variant->functions[call.negative ? NEGATIVE_SCALE_KERNEL : KERNEL];
  return kernel(self, call.checked, ARGUMENTS + further, result);
}

/* flash_attention_forward(q, k, v, out, lse, scale, the extras) -> None */
EXPORTED() {
  return forward(self, args, count, result, NULL);
}

/* flash_attention_forward_variant(number, then as above) -> None: by the variant of this number in the manifest, from 0 on, so that each can
 * be checked on calls which the choice would give to another. */
EXPORTED(_variant) {
  const Variant *variant = variant_of_number(args, count);
  return variant == NULL ? -1 : forward(self, args + 1, count - 1, result, variant);
}

#if FLASHTIR_BUCKET_COUNT
/* flash_attention_forward_bucket(q_len, kv_len) -> number of a bucket in the manifest, from 0 on. */
EXPORTED(_bucket) {
  (void)self;
  return tell_bucket(args, count, result);
}
#endif

#if FLASHTIR_ALONE
/* Code that calls the module's main function, as TVM lets it, gets the checked one; the generated one is weak and yields. */
TVM_FFI_DLL_EXPORT int __tvm_ffi_main(void *, const TVMFFIAny *, int32_t, TVMFFIAny *)
    __attribute__((alias("__tvm_ffi_flash_attention_forward")));
#endif
