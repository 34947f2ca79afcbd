//! `mpool-c.md`, which is written by hand: what the page says exists, exists, and it leaves no
//! function out.

use std::collections::BTreeSet;
use std::error::Error;
use std::io::IoSlice;

use mpool::*;

/// The functions of mpool 1.x's header.
const FIRST: &str = "
    mpool_create mpool_destroy mpool_rename mpool_scan mpool_list mpool_activate mpool_deactivate mpool_open mpool_close
    mpool_mclass_add mpool_mclass_get mpool_usage_get mpool_dev_props_get
    mpool_params_init mpool_params_get mpool_params_set
    mpool_mlog_alloc mpool_mlog_commit mpool_mlog_abort mpool_mlog_delete mpool_mlog_open mpool_mlog_close
    mpool_mlog_append mpool_mlog_rewind mpool_mlog_read mpool_mlog_seek_read mpool_mlog_sync mpool_mlog_len
    mpool_mlog_erase mpool_mlog_props_get
    mpool_mdc_alloc mpool_mdc_commit mpool_mdc_abort mpool_mdc_delete mpool_mdc_get_root mpool_mdc_open mpool_mdc_close
    mpool_mdc_sync mpool_mdc_rewind mpool_mdc_read mpool_mdc_append mpool_mdc_cstart mpool_mdc_cend mpool_mdc_usage
    mpool_mblock_alloc mpool_mblock_find mpool_mblock_commit mpool_mblock_abort mpool_mblock_delete
    mpool_mblock_props_get mpool_mblock_write mpool_mblock_read
    mpool_mcache_mmap mpool_mcache_munmap mpool_mcache_madvise mpool_mcache_purge mpool_mcache_mincore
    mpool_mcache_getbase mpool_mcache_getpages
    mpool_strerror mpool_strinfo mpool_errno";

/// Those that only the headers of HSE 2 and 3 have.
const SECOND: &str = "
    mpool_cparams_defaults mpool_mclass_destroy mpool_mclass_props_get mpool_mclass_info_get mpool_mclass_stats_get
    mpool_mclass_is_configured mpool_mclass_ftw mpool_props_get mpool_info_get mpool_stats_get
    mpool_mdc_rootid_get mpool_mdc_root_create mpool_mdc_root_open mpool_mdc_root_destroy
    mpool_mblock_clone mpool_mblock_punch mpool_mblock_mmap mpool_mblock_munmap
    mpool_file_open mpool_file_close mpool_file_destroy mpool_file_read mpool_file_write mpool_file_sync mpool_file_mmap
    mpool_file_size mpool_mcpath_is_fsdax";

/// The paths of items as text. It does not compile when one of them does not exist.
macro_rules! items {
    (
        types: $($type:ty),+;
        values: $($value:path),+;
        variants: $($of:ty: $variant:path),+;
        fields: $($struct:ident $field:ident),+;
    ) => {{
        $(let _ = size_of::<$type>();)+
        $(let _ = $value;)+
        $(let _ = |value: $of| matches!(value, $variant { .. });)+
        $(let _ = |value: &$struct| { let _ = &value.$field; };)+
        [$(stringify!($type),)+ $(stringify!($value),)+ $(stringify!($variant),)+
            $(concat!(stringify!($struct), "::", stringify!($field)),)+]
    }};
}

fn items() -> BTreeSet<&'static str> {
    BTreeSet::from(items! {
        types: AlignedBuf, Advice, Allocation, ClassUsage, Damage, Fallback, LogProps, MapError, Mblock, MblockProps,
            MblockWriter, Mcache, McacheMap, Mdc, MediaClass, Mlog, Object, ObjectError, OpenOptions, Pool, PoolError,
            PoolProps, Settings, Temperature, Usage;
        values: Pool::add_class, Pool::create, Pool::destroy, Pool::mblock, Pool::mblock_alloc, Pool::mblock_delete,
            Pool::mblocks, Pool::mdc_create, Pool::mdc_delete, Pool::mdc_open, Pool::mdcs, Pool::mlog_create,
            Pool::mlog_delete, Pool::mlog_open, Pool::mlogs, Pool::open, Pool::props, Pool::rename, Pool::usage,
            Registry::create, Registry::destroy, Registry::find, Registry::list, Registry::rename,
            Mblock::props, Mblock::read, MblockWriter::abort, MblockWriter::class, MblockWriter::commit,
            MblockWriter::commit_all, MblockWriter::id, MblockWriter::len, MblockWriter::write,
            Mlog::append, Mlog::erase, Mlog::generation, Mlog::len, Mlog::position, Mlog::props, Mlog::read, Mlog::rewind,
            Mlog::seek, Mlog::skip_damaged, Mlog::sync,
            Mdc::append, Mdc::append_freeing, Mdc::end_compaction, Mdc::props, Mdc::read, Mdc::rewind,
            Mdc::start_compaction, Mdc::sync, Mdc::usage,
            Mcache::map, Mcache::map_touched, Mcache::new, Mcache::stats, McacheMap::advise, McacheMap::get, McacheMap::get_pages,
            McacheMap::mblock, McacheMap::purge, McacheMap::resident_bytes, McacheMap::virtual_bytes,
            IoError::os, ROOT_MDC;
        variants: Access: Access::Exclusive, Access: Access::Shared, ObjectError: ObjectError::Mapped,
            ObjectError: ObjectError::Open, PoolError: PoolError::Busy;
        fields: ClassUsage direct_io, ClassUsage present, ClassUsage room, MblockProps stored, Settings read_ahead,
            Usage classes;
    })
}

/// Lines of code as text, compiled as one function.
macro_rules! code {
    (|$pool:ident, $bytes:ident| $({ $($token:tt)* })+) => {{
        let _ = |$pool: Pool, $bytes: &[u8]| -> Result<(), Box<dyn Error>> { $($($token)*;)+ Ok(()) };
        [$(stringify!($($token)*)),+]
    }};
}

/// What stands between backquotes.
fn spans(text: &str) -> impl Iterator<Item = &str> {
    text.split('`').skip(1).step_by(2)
}

/// The rows of the page's tables: function, job, counterpart, difference.
fn rows(page: &str) -> Vec<[&str; 4]> {
    page.lines()
        .filter(|line| line.starts_with("| `mpool_"))
        .map(|line| {
            let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
            <[&str; 4]>::try_from(cells).unwrap_or_else(|cells| panic!("{} columns: {line}", cells.len()))
        })
        .collect()
}

pub(super) fn check(page: &str) {
    let (rows, items) = (rows(page), items());
    let listed: Vec<&str> = rows.iter().flat_map(|row| spans(row[0])).collect();
    let published: BTreeSet<&str> = FIRST.split_whitespace().chain(SECOND.split_whitespace()).collect();
    assert_eq!((FIRST.split_whitespace().count(), published.len()), (62, listed.len()), "a function is listed twice");
    assert_eq!(BTreeSet::from_iter(listed), published, "the page's functions and the headers'");

    for [function, job, here, differs] in rows {
        assert!(!job.is_empty(), "{function}: no job");
        let counterparts: Vec<&str> = spans(here).collect();
        assert_eq!(counterparts.is_empty(), here == "*none*", "{function}: a counterpart or none");
        assert!(!counterparts.is_empty() || !differs.is_empty(), "{function}: why there is none");
        for path in counterparts.iter().copied().chain(spans(differs).filter(|span| span.contains("::"))) {
            assert!(items.contains(path), "{function}: `{path}` is not among the items that this test compiles");
        }
    }
    let text: BTreeSet<&str> = spans(page).collect();
    let unnamed: Vec<_> = items.iter().filter(|item| !text.contains(*item)).collect();
    assert!(unnamed.is_empty(), "the page does not name {unnamed:?}");

    let dense = |text: &str| text.split_whitespace().collect::<String>();
    let example = code! { |pool, bytes|
        { let mut writer = pool.mblock_alloc(Allocation::default())? }
        { writer.write(&[IoSlice::new(bytes)])? }
        { let id = writer.commit()? }
        { let map = Mcache::new(Settings::default())?.map(&pool, &[id], Temperature::Warm)? }
        { map.mblock(0) }
    };
    for line in example {
        assert!(spans(page).any(|span| dense(span) == dense(line)), "the page does not have `{line}`");
    }
}
