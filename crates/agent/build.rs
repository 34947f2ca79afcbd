//! How the library is linked.

fn main() {
    // The library's own uses of `madvise`, `close` and so on mean its own functions. Where it is
    // loaded late (`pageone attach`) the loader would otherwise give it the C library's.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-Bsymbolic-functions");
    println!("cargo::rerun-if-changed=build.rs");
}
