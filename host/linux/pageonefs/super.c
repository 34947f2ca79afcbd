// SPDX-License-Identifier: GPL-2.0
/*
 * Mounts: tmpfs's options and one more, domain=NAME. The super block and its root are tmpfs's; its
 * operations are replaced before anybody can see it. A domain's stores are mounts without a place.
 */
#include <linux/fs_parser.h>
#include <linux/module.h>
#include <linux/mount.h>
#include <linux/seq_file.h>
#include <linux/slab.h>
#include <linux/statfs.h>

#include "names.h"
#include "super.h"
#include "tmpfs.h"

struct file_operations pofs_root_ops;
static struct kmem_cache *inodes;

/* tmpfs's context lies in ours. */
struct pofs_context {
	const struct fs_context_operations *base;
	void *private;
	bool store;
	char domain[PAGEONEFS_DOMAIN_MAX];
};

/* Calls tmpfs with its own context in place. */
#define with_base(fc, call) ({						\
	struct pofs_context *c_ = (fc)->fs_private;			\
	int ret_;							\
	(fc)->fs_private = c_->private;					\
	ret_ = call;							\
	c_->private = (fc)->fs_private;					\
	(fc)->fs_private = c_;						\
	ret_; })

/* ---- inodes ---------------------------------------------------------------------- */

static void inode_once(void *object)
{
	struct pofs_inode *pi = object;

	inode_init_once(pofs_vfs(pi));
}

int pofs_super_start(void)
{
	inodes = kmem_cache_create("pageonefs_inode", sizeof(struct pofs_inode), 0, SLAB_RECLAIM_ACCOUNT | SLAB_ACCOUNT,
				   inode_once);
	return inodes ? 0 : -ENOMEM;
}

void pofs_super_stop(void)
{
	kmem_cache_destroy(inodes);
}

static struct inode *alloc_inode(struct super_block *sb)
{
	struct pofs_inode *pi = alloc_inode_sb(sb, inodes, GFP_KERNEL);
	int i;

	if (!pi)
		return NULL;
	xa_init_flags(&pi->merged, XA_FLAGS_ACCOUNT);
	xa_init_flags(&pi->lent, XA_FLAGS_ACCOUNT);
	xa_init_flags(&pi->dirty, XA_FLAGS_ACCOUNT);
	pi->payer = NULL;
	atomic_long_set(&pi->count, 0);
	pi->around_end = pi->around = 0;
	pi->write_end = pi->write_run = 0;
	for (i = 0; i < POFS_MAPPING_LOCKS; i++)
		init_rwsem(&pi->mapping[i]);
	init_rwsem(&pi->faults);
	init_rwsem(&pi->merging);
	pi->blocked = 0;
	pi->cuts = 0;
	pi->plain = PAGEONEFS_PLAIN_NO;
	pi->gives = false;
	pi->pin = (struct pofs_pin){ .index = ULONG_MAX };
	spin_lock_init(&pi->pin.lock);
	pi->id = 0;
	return pofs_vfs(pi);
}

/* tmpfs made the root, before the super block was ours. */
static char root_mark;

static void free_inode(struct inode *inode)
{
	if (inode->i_private == &root_mark) {
		inode->i_private = NULL;
		pofs_base.super->free_inode(inode);
		return;
	}
	if (S_ISLNK(inode->i_mode))
		kfree(inode->i_link);
	kmem_cache_free(inodes, POFS_I(inode));
}

static void evict_inode(struct inode *inode)
{
	if (inode->i_private != &root_mark)
		pofs_evict_inode(inode);
	pofs_base.super->evict_inode(inode);
}

/* ---- mounting -------------------------------------------------------------------- */

static int show_options(struct seq_file *m, struct dentry *root)
{
	struct pofs_super *ps = POFS_SB(root->d_sb);

	if (ps->domain->name[0])
		seq_show_option(m, "domain", ps->domain->name);
	return pofs_base.super->show_options(m, root);
}

/* Merged pages use the mount's blocks, too. */
static int mount_statfs(struct dentry *dentry, struct kstatfs *buf)
{
	struct pofs_account *account = &POFS_SB(dentry->d_sb)->account;
	int ret = pofs_base.super->statfs(dentry, buf);

	if (!ret && buf->f_blocks)
		buf->f_bfree = buf->f_bavail = max_t(s64, 0, buf->f_blocks - pofs_account_used(account));
	return ret;
}

static void super_free(struct pofs_super *ps)
{
	pofs_account_free(&ps->account);
	pofs_news(ps);
	pofs_news_to(ps, NULL);
	pofs_domain_put(ps->domain);
	xa_destroy(&ps->files);
	kfree(ps);
}

static void kill_sb(struct super_block *sb)
{
	struct pofs_super *ps = sb->s_op && sb->s_op->alloc_inode == alloc_inode ? POFS_SB(sb) : NULL;

	pofs_base.type->kill_sb(sb);
	if (ps)
		super_free(ps);
}

static int context_get_tree(struct fs_context *fc)
{
	struct pofs_context *c = fc->fs_private;
	struct pofs_super *ps = kzalloc(sizeof(*ps), GFP_KERNEL);
	struct super_block *sb;
	struct inode *root;
	int ret;

	if (!ps)
		return -ENOMEM;
	ps->store = c->store;
	xa_init(&ps->files);
	spin_lock_init(&ps->news_lock);
	ps->domain = pofs_domain_get(c->domain);
	if (!ps->domain) {
		kfree(ps);
		return -ENOMEM;
	}
	ret = pofs_account_init(&ps->account) ?: with_base(fc, c->base->get_tree(fc));
	if (ret) {
		super_free(ps);
		return ret;
	}
	sb = fc->root->d_sb;
	pofs_account_mounted(&ps->account, sb->s_fs_info);
	ps->ops = *sb->s_op;
	ps->ops.alloc_inode = alloc_inode;
	ps->ops.free_inode = free_inode;
	ps->ops.evict_inode = evict_inode;
	ps->ops.show_options = show_options;
	ps->ops.statfs = mount_statfs;
	root = d_inode(fc->root);
	root->i_private = &root_mark;
	root->i_op = &pofs_dir_ops;
	root->i_fop = &pofs_root_ops;
	sb->s_op = &ps->ops;
	/* tmpfs commits whole pages: of a longer file, fewer than none. */
	if (!pofs_no_length_bound)
		sb->s_maxbytes = MAX_LFS_FILESIZE & PAGE_MASK;
	/* As memfds': security modules that go by paths pass it over. */
	if (ps->store)
		sb->s_flags |= SB_NOUSER;
	return 0;
}

static int parse_domain(struct fs_context *fc, struct fs_parameter *param)
{
	struct pofs_context *c = fc->fs_private;
	size_t i;

	if (param->type != fs_value_is_string || !param->size)
		return invalf(fc, "pageonefs: domain= takes a name");
	if (param->size >= PAGEONEFS_DOMAIN_MAX)
		return invalf(fc, "pageonefs: a domain's name has at most %u bytes", PAGEONEFS_DOMAIN_MAX - 1);
	for (i = 0; i < param->size; i++)
		if (!isgraph(param->string[i]))
			return invalf(fc, "pageonefs: a domain's name has no blanks and no control characters");
	if (fc->purpose == FS_CONTEXT_FOR_RECONFIGURE && strcmp(param->string, POFS_SB(fc->root->d_sb)->domain->name))
		return invalf(fc, "pageonefs: a mount stays in its domain: unmount it, and mount it with the other");
	strscpy(c->domain, param->string, sizeof(c->domain));
	return 0;
}

static int context_parse_param(struct fs_context *fc, struct fs_parameter *param)
{
	struct pofs_context *c = fc->fs_private;

	if (!strcmp(param->key, "domain"))
		return parse_domain(fc, param);
	/* With others, write(2) and copies of frames would make huge pages over merged ones. */
	if (!strcmp(param->key, "huge") && (param->type != fs_value_is_string ||
					    (strcmp(param->string, "never") && strcmp(param->string, "advise"))))
		return invalf(fc, "pageonefs: huge= takes never, or advise: where a program asks by MADV_HUGEPAGE");
	if (strstr(param->key, "quota"))
		return invalf(fc, "pageonefs: there are no quotas: use size=");
	return with_base(fc, c->base->parse_param(fc, param));
}

/* Calls vfs_parse_fs_string() for each option, which comes here again. */
static int context_parse_monolithic(struct fs_context *fc, void *data)
{
	struct pofs_context *c = fc->fs_private;

	return c->base->parse_monolithic(fc, data);
}

/* Remounts come one after the other: no other sets a size between the look and the change. */
static int context_reconfigure(struct fs_context *fc)
{
	struct pofs_account *account = &POFS_SB(fc->root->d_sb)->account;
	struct pofs_context *c = fc->fs_private;
	/* The first of tmpfs's options: 0 where no limit is given. It knows of private pages alone. */
	u64 most = *(unsigned long long *)c->private;
	int ret;

	lockdep_assert_held_write(&fc->root->d_sb->s_umount);
	ret = most && account->tmpfs->max_blocks ? pofs_account_fits(account, most) : 0;
	if (ret == -ENOSPC)
		return invalf(fc, "pageonefs: too small a size for what is used");
	return ret ?: with_base(fc, c->base->reconfigure(fc));
}

static void context_free(struct fs_context *fc)
{
	struct pofs_context *c = fc->fs_private;

	if (!c)
		return;
	fc->fs_private = c->private;
	c->base->free(fc);
	fc->fs_private = NULL;
	kfree(c);
}

static const struct fs_context_operations context_ops = {
	.free = context_free,
	.parse_param = context_parse_param,
	.parse_monolithic = context_parse_monolithic,
	.get_tree = context_get_tree,
	.reconfigure = context_reconfigure,
};

static int init_fs_context(struct fs_context *fc)
{
	struct pofs_context *c = kzalloc(sizeof(*c), GFP_KERNEL);
	int ret;

	if (!c)
		return -ENOMEM;
	ret = pofs_base.type->init_fs_context(fc);
	if (ret) {
		kfree(c);
		return ret;
	}
	c->base = fc->ops;
	c->private = fc->fs_private;
	fc->fs_private = c;
	fc->ops = &context_ops;
	return 0;
}

struct file_system_type pofs_type = {
	.owner = THIS_MODULE,
	.name = "pageonefs",
	.init_fs_context = init_fs_context,
	.kill_sb = kill_sb,
};

/* ---- stores ---------------------------------------------------------------------- */

static struct vfsmount *store_mount(struct pofs_domain *domain)
{
	struct fs_context *fc = fs_context_for_mount(&pofs_type, 0);
	struct vfsmount *mount;
	int ret;

	if (IS_ERR(fc))
		return ERR_CAST(fc);
	((struct pofs_context *)fc->fs_private)->store = true;
	/* The daemon makes these files: nothing else bounds them. */
	ret = vfs_parse_fs_string(fc, "size", "0", 1) ?: vfs_parse_fs_string(fc, "nr_inodes", "0", 1) ?:
	      vfs_parse_fs_string(fc, "domain", domain->name, strlen(domain->name));
	mount = ret ? ERR_PTR(ret) : fc_mount(fc);
	put_fs_context(fc);
	return mount;
}

/* A descriptor of the root of a new store. It goes with that, and with the last of its files. */
int pofs_store_open(struct pofs_domain *domain)
{
	struct vfsmount *mount;
	struct path path;
	struct file *file;
	int fd;

	/* A store of a mount that shares with no other would lend to nobody. */
	if (!domain->name[0])
		return -EINVAL;
	fd = get_unused_fd_flags(O_CLOEXEC);
	if (fd < 0)
		return fd;
	mount = store_mount(domain);
	if (IS_ERR(mount)) {
		put_unused_fd(fd);
		return PTR_ERR(mount);
	}
	path = (struct path){ .mnt = mount, .dentry = mount->mnt_root };
	file = dentry_open(&path, O_RDONLY | O_DIRECTORY, current_cred());
	mntput(mount);
	if (IS_ERR(file)) {
		put_unused_fd(fd);
		return PTR_ERR(file);
	}
	fd_install(fd, file);
	return fd;
}
