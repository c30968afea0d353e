// All that the NvInfer headers take from the CUDA runtime. It stands in for the toolkit's header of this name, so that
// the plugin builds without a CUDA toolkit; the declarations are the toolkit's own and may meet them in one program.
#pragma once

typedef struct CUstream_st* cudaStream_t;
typedef struct CUevent_st* cudaEvent_t;
