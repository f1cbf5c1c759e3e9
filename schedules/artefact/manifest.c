/* What an artefact says about itself: flash_attention_manifest. Compiled into each artefact with a generated header, manifest_config.h,
 * with these constants:
 *
 *   FLASHTIR_MANIFEST  JSON text
 *   FLASHTIR_ALONE     1 where the artefact holds one workload
 */
#include <tvm/ffi/c_api.h>

#include "manifest_config.h"

/* flash_attention_manifest() -> JSON text */
TVM_FFI_DLL_EXPORT int __tvm_ffi_flash_attention_manifest(void *self, const TVMFFIAny *args, int32_t count, TVMFFIAny *result) {
  (void)self, (void)args, (void)count;
  TVMFFIByteArray text = {FLASHTIR_MANIFEST, sizeof FLASHTIR_MANIFEST - 1};
  return TVMFFIStringFromByteArray(&text, result);
}

#if !FLASHTIR_ALONE
/* Of several workloads none is the main one. The generated main function, which is weak and reaches a kernel past the checks, yields. */
TVM_FFI_DLL_EXPORT int __tvm_ffi_main(void *self, const TVMFFIAny *args, int32_t count, TVMFFIAny *result) {
  (void)self, (void)args, (void)count, (void)result;
  TVMFFIErrorSetRaisedFromCStr("TypeError", "an artefact of one workload has a main function, found one of several: call a function that "
                               "flash_attention_manifest names");
  return -1;
}
#endif
