//! The SD tree: a lock-free bit trie over keys that live with the caller.
