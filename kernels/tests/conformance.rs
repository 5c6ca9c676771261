//! The reference backend under the suite that every backend passes: in f32 it shows that the tolerances can be met by plain arithmetic, in
//! bf16 precision that the prescribed roundings stay within their margin.

use tandem_kernels::{Precision, reference::ReferenceBackend};

mod reference_f32 {
    use super::*;
    tandem_kernels::conformance!(ReferenceBackend::<f32>::new(Precision::F32));
}

mod reference_bf16 {
    use super::*;
    tandem_kernels::conformance!(ReferenceBackend::<f32>::new(Precision::Bf16));
}
