//! Where the linker finds libpageone_agent.so: in `PAGEONE_LIB_DIR`, else beside what is built here
//! (the workspace's own tests), else where the system has libraries.

use std::env;
use std::path::Path;

fn main() {
    println!("cargo::rerun-if-env-changed=PAGEONE_LIB_DIR");
    if let Some(directory) = env::var_os("PAGEONE_LIB_DIR") {
        println!("cargo::rustc-link-search=native={}", Path::new(&directory).display());
    }
    // OUT_DIR is PROFILE/build/pageone-vmm-HASH/out.
    let out = env::var_os("OUT_DIR").unwrap_or_default();
    if let Some(profile) = Path::new(&out).ancestors().nth(3) {
        println!("cargo::rustc-link-search=native={}", profile.join("deps").display());
    }
}
