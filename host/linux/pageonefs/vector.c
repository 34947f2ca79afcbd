// SPDX-License-Identifier: GPL-2.0
/*
 * Reading whole pages: digests, comparing, and whether all is zeros. With AVX2 where the processor
 * has it, or else with SSE2, which every x86-64 has.
 *
 * All of it is called between pofs_vector_begin() and pofs_vector_end(), where nothing sleeps and
 * no soft interrupt runs: at most POFS_VECTOR_PAGES pages at a time. The compiler does not use
 * vector registers in the kernel: they keep what is in them from one asm statement to the next, and
 * none is named as clobbered.
 *
 * The digest is XXH3, 64 bits, with a seed, of 4096 bytes: four blocks of 16 stripes of 64 bytes,
 * where the last stripe has a secret of its own. A sum is added to in pairs of words that are
 * swapped: here these are summed by themselves, and swapped once a block.
 */
#include <asm/cpufeature.h>
#include <asm/fpu/api.h>
#include <linux/highmem.h>
#include <linux/jump_label.h>

#include "vector.h"

static DEFINE_STATIC_KEY_FALSE(have_avx2);

void pofs_vector_start(void)
{
	if (boot_cpu_has(X86_FEATURE_AVX2) && boot_cpu_has(X86_FEATURE_OSXSAVE) &&
	    cpu_has_xfeatures(XFEATURE_MASK_SSE | XFEATURE_MASK_YMM, NULL))
		static_branch_enable(&have_avx2);
}

void pofs_vector_begin(void)
{
	kernel_fpu_begin();
}

/* The upper halves are zeros again: code that uses SSE next would be slow. */
void pofs_vector_end(void)
{
	if (static_branch_likely(&have_avx2))
		asm volatile("vzeroupper");
	kernel_fpu_end();
}

/* ---- zeros, and equal pages --------------------------------------------------------- */

/* 512 bytes from `at` on: the instruction for each 32, or 16, of them. */
#define EACH_32 "0,32,64,96,128,160,192,224,256,288,320,352,384,416,448,480"
#define EACH_16 "0,16,32,48,64,80,96,112,128,144,160,176,192,208,224,240," \
		"256,272,288,304,320,336,352,368,384,400,416,432,448,464,480,496"

static bool zeros_512(const void *at)
{
	bool zero;

	if (static_branch_likely(&have_avx2))
		asm volatile("vpxor %%xmm0, %%xmm0, %%xmm0\n"
			     ".irp o," EACH_32 "\n\tvpor \\o(%[at]), %%ymm0, %%ymm0\n.endr\n"
			     "vptest %%ymm0, %%ymm0\n"
			     : "=@ccz" (zero) : [at] "r" (at) : "memory");
	else
		asm volatile("pxor %%xmm0, %%xmm0\n\tpxor %%xmm1, %%xmm1\n"
			     ".irp o," EACH_16 "\n\tpor \\o(%[at]), %%xmm0\n.endr\n"
			     "pcmpeqb %%xmm1, %%xmm0\n\tpmovmskb %%xmm0, %%eax\n\tcmp $0xffff, %%eax\n"
			     : "=@ccz" (zero) : [at] "r" (at) : "memory", "eax");
	return zero;
}

static bool zeros(const void *at)
{
	unsigned int done;

	/* Most pages that are not all zeros do not begin with them. */
	if (((const u64 *)at)[0] | ((const u64 *)at)[1])
		return false;
	for (done = 0; done < PAGE_SIZE; done += 512)
		if (!zeros_512(at + done))
			return false;
	return true;
}

bool pofs_page_zeros(struct page *page)
{
	const void *at = kmap_local_page(page);
	bool zero = zeros(at);

	kunmap_local(at);
	return zero;
}

/* In turns of 512 bytes. */
static bool equal(const void *a, const void *b)
{
	unsigned int turns = PAGE_SIZE / 512;
	bool same;

	if (static_branch_likely(&have_avx2))
		asm volatile("vpxor %%xmm0, %%xmm0, %%xmm0\n"
			     "1:\n.irp o," EACH_32 "\n\t"
			     "vmovdqa \\o(%[a]), %%ymm1\n\tvpxor \\o(%[b]), %%ymm1, %%ymm1\n\tvpor %%ymm1, %%ymm0, %%ymm0\n"
			     ".endr\n"
			     "vptest %%ymm0, %%ymm0\n\tjnz 2f\n\t"
			     "add $512, %[a]\n\tadd $512, %[b]\n\tdec %[turns]\n\tjnz 1b\n"
			     "2:\n"
			     : "=@ccz" (same), [a] "+r" (a), [b] "+r" (b), [turns] "+r" (turns) : : "memory");
	else
		asm volatile("pcmpeqd %%xmm0, %%xmm0\n"
			     "1:\n.irp o," EACH_16 "\n\t"
			     "movdqa \\o(%[a]), %%xmm1\n\tpcmpeqd \\o(%[b]), %%xmm1\n\tpand %%xmm1, %%xmm0\n"
			     ".endr\n"
			     "pmovmskb %%xmm0, %%eax\n\tcmp $0xffff, %%eax\n\tjne 2f\n\t"
			     "add $512, %[a]\n\tadd $512, %[b]\n\tdec %[turns]\n\tjnz 1b\n"
			     "2:\n"
			     : "=@ccz" (same), [a] "+r" (a), [b] "+r" (b), [turns] "+r" (turns) : : "memory", "eax");
	/* The flag of whatever ended it: all turns are over, or something differs. */
	return same;
}

bool pofs_pages_equal(struct page *a, struct page *b)
{
	const void *p = kmap_local_page(a), *q = kmap_local_page(b);
	bool ret = equal(p, q);

	kunmap_local(q);
	kunmap_local(p);
	return ret;
}

/* ---- digests ------------------------------------------------------------------------ */

#define PRIME32_1 0x9E3779B1U
#define PRIME32_2 0x85EBCA77U
#define PRIME32_3 0xC2B2AE3DU
#define PRIME64_1 0x9E3779B185EBCA87ULL
#define PRIME64_2 0xC2B2AE3D27D4EB4FULL
#define PRIME64_3 0x165667B19E3779F9ULL
#define PRIME64_4 0x85EBCA77C2B2AE63ULL
#define PRIME64_5 0x27D4EB2F165667C5ULL

/* The function's own secret, as little-endian words. */
static const u64 secret_of_xxh3[POFS_SECRET / 8] = {
	0xbe4ba423396cfeb8, 0x1cad21f72c81017c, 0xdb979083e96dd4de, 0x1f67b3b7a4a44072,
	0x78e5c0cc4ee679cb, 0x2172ffcc7dd05a82, 0x8e2443f7744608b8, 0x4c263a81e69035e0,
	0xcb00c391bb52283c, 0xa32e531b8b65d088, 0x4ef90da297486471, 0xd8acdea946ef1938,
	0x3f349ce33f76faa8, 0x1d4f0bc7c7bbdcf9, 0x3159b4cd4be0518a, 0x647378d9c97e9fc8,
	0xc3ebd33483acc5ea, 0xeb6313faffa081c5, 0x49daf0b751dd0d17, 0x9e68d429265516d3,
	0xfca1477d58be162b, 0xce31d07ad1b8f88f, 0x280416958f3acb45, 0x7e404bbbcafbd7af,
};

void pofs_secret(struct pofs_secret *secret, u64 seed)
{
	unsigned int i;

	for (i = 0; i < POFS_SECRET / 8; i++)
		secret->words[i] = i % 2 ? secret_of_xxh3[i] - seed : secret_of_xxh3[i] + seed;
}

struct sums {
	u64 v[8];
} __aligned(32);

static const struct sums first_sums = {
	{ PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1 }
};

/*
 * In all that follows, sum number i is in xmm<i> or ymm<i>, what is to be added to it swapped in
 * xmm1<i> or ymm1<i>, and the prime in number 7. AVX2 takes 32 bytes at a time, SSE2 16.
 *
 * The stripes of a list, each with the secret 8 bytes further:
 */
#define AVX2_STRIPES(list, at_, secret_)					\
	({ asm volatile(".irp n," list "\n.irp i,0,1\n\t"			\
		     "vmovdqa \\n*64+\\i*32(%[at]), %%ymm4\n\t"		\
		     "vpxor \\n*8+\\i*32(%[secret]), %%ymm4, %%ymm5\n\t"	\
		     "vpaddq %%ymm4, %%ymm1\\i, %%ymm1\\i\n\t"		\
		     "vpsrlq $32, %%ymm5, %%ymm6\n\t"				\
		     "vpmuludq %%ymm5, %%ymm6, %%ymm6\n\t"			\
		     "vpaddq %%ymm6, %%ymm\\i, %%ymm\\i\n"			\
		     ".endr\n.endr"						\
		     : : [at] "r" (at_), [secret] "r" (secret_) : "memory"); })
#define SSE2_STRIPES(list, at_, secret_)					\
	({ asm volatile(".irp n," list "\n.irp i,0,1,2,3\n\t"			\
		     "movdqa \\n*64+\\i*16(%[at]), %%xmm4\n\t"			\
		     "movdqu \\n*8+\\i*16(%[secret]), %%xmm5\n\t"		\
		     "pxor %%xmm4, %%xmm5\n\t"					\
		     "paddq %%xmm4, %%xmm1\\i\n\t"				\
		     "movdqa %%xmm5, %%xmm6\n\tpsrlq $32, %%xmm6\n\t"		\
		     "pmuludq %%xmm5, %%xmm6\n\t"				\
		     "paddq %%xmm6, %%xmm\\i\n"				\
		     ".endr\n.endr"						\
		     : : [at] "r" (at_), [secret] "r" (secret_) : "memory"); })

#define UP_TO_14 "0,1,2,3,4,5,6,7,8,9,10,11,12,13,14"
#define BLOCK 1024
#define SCRAMBLING (POFS_SECRET - 64)
/* Of the last stripe, and of the end. */
#define LAST (POFS_SECRET - 64 - 7)
#define ENDING 11

static void add_swapped_by_avx2(void)
{
	asm volatile(".irp i,0,1\n\t"
		     "vpshufd $0x4e, %ymm1\\i, %ymm1\\i\n\tvpaddq %ymm1\\i, %ymm\\i, %ymm\\i\n\t"
		     "vpxor %xmm1\\i, %xmm1\\i, %xmm1\\i\n.endr");
}

static void add_swapped_by_sse2(void)
{
	asm volatile(".irp i,0,1,2,3\n\t"
		     "pshufd $0x4e, %xmm1\\i, %xmm1\\i\n\tpaddq %xmm1\\i, %xmm\\i\n\t"
		     "pxor %xmm1\\i, %xmm1\\i\n.endr");
}

static void scramble_by_avx2(const void *secret)
{
	asm volatile(".irp i,0,1\n\t"
		     "vpsrlq $47, %%ymm\\i, %%ymm4\n\tvpxor %%ymm4, %%ymm\\i, %%ymm\\i\n\t"
		     "vpxor \\i*32(%[secret]), %%ymm\\i, %%ymm\\i\n\t"
		     "vpsrlq $32, %%ymm\\i, %%ymm4\n\tvpmuludq %%ymm7, %%ymm4, %%ymm4\n\t"
		     "vpsllq $32, %%ymm4, %%ymm4\n\tvpmuludq %%ymm7, %%ymm\\i, %%ymm\\i\n\t"
		     "vpaddq %%ymm4, %%ymm\\i, %%ymm\\i\n.endr"
		     : : [secret] "r" (secret + SCRAMBLING) : "memory");
}

static void scramble_by_sse2(const void *secret)
{
	asm volatile(".irp i,0,1,2,3\n\t"
		     "movdqa %%xmm\\i, %%xmm4\n\tpsrlq $47, %%xmm4\n\tpxor %%xmm4, %%xmm\\i\n\t"
		     "movdqu \\i*16(%[secret]), %%xmm4\n\tpxor %%xmm4, %%xmm\\i\n\t"
		     "movdqa %%xmm\\i, %%xmm4\n\tpsrlq $32, %%xmm4\n\tpmuludq %%xmm7, %%xmm4\n\t"
		     "psllq $32, %%xmm4\n\tpmuludq %%xmm7, %%xmm\\i\n\tpaddq %%xmm4, %%xmm\\i\n.endr"
		     : : [secret] "r" (secret + SCRAMBLING) : "memory");
}

static void sums_by_avx2(const void *at, const void *secret, struct sums *sums)
{
	const void *end = at + PAGE_SIZE - BLOCK;
	u64 prime = PRIME32_1;

	asm volatile("vmovdqa (%[first]), %%ymm0\n\tvmovdqa 32(%[first]), %%ymm1\n\t"
		     "vpxor %%xmm10, %%xmm10, %%xmm10\n\tvpxor %%xmm11, %%xmm11, %%xmm11\n\t"
		     "vpbroadcastq %[prime], %%ymm7"
		     : : [first] "r" (&first_sums), "m" (first_sums), [prime] "m" (prime));
	for (; at < end; at += BLOCK) {
		AVX2_STRIPES(UP_TO_14 ",15", at, secret);
		add_swapped_by_avx2();
		scramble_by_avx2(secret);
	}
	AVX2_STRIPES(UP_TO_14, at, secret);
	AVX2_STRIPES("0", at + BLOCK - 64, secret + LAST);
	add_swapped_by_avx2();
	asm volatile("vmovdqa %%ymm0, (%[sums])\n\tvmovdqa %%ymm1, 32(%[sums])" : "=m" (*sums) : [sums] "r" (sums));
}

static void sums_by_sse2(const void *at, const void *secret, struct sums *sums)
{
	const void *end = at + PAGE_SIZE - BLOCK;
	u64 prime = PRIME32_1;

	asm volatile(".irp i,0,1,2,3\n\tmovdqa \\i*16(%[first]), %%xmm\\i\n\tpxor %%xmm1\\i, %%xmm1\\i\n.endr\n\t"
		     "movq %[prime], %%xmm7\n\tpshufd $0x44, %%xmm7, %%xmm7"
		     : : [first] "r" (&first_sums), "m" (first_sums), [prime] "m" (prime));
	for (; at < end; at += BLOCK) {
		SSE2_STRIPES(UP_TO_14 ",15", at, secret);
		add_swapped_by_sse2();
		scramble_by_sse2(secret);
	}
	SSE2_STRIPES(UP_TO_14, at, secret);
	SSE2_STRIPES("0", at + BLOCK - 64, secret + LAST);
	add_swapped_by_sse2();
	asm volatile(".irp i,0,1,2,3\n\tmovdqa %%xmm\\i, \\i*16(%[sums])\n.endr" : "=m" (*sums) : [sums] "r" (sums));
}

/* Of two sums, and the two words of the secret from `at` on. */
static u64 fold(const u64 *sums, const void *at)
{
	unsigned __int128 product;
	u64 words[2];

	memcpy(words, at, sizeof(words));
	product = (unsigned __int128)(sums[0] ^ words[0]) * (sums[1] ^ words[1]);
	return (u64)product ^ (u64)(product >> 64);
}

u64 pofs_page_digest(struct page *page, const struct pofs_secret *secret)
{
	const void *at = kmap_local_page(page), *ending = (const void *)secret->words + ENDING;
	u64 digest = PAGE_SIZE * PRIME64_1;
	struct sums sums;
	unsigned int i;

	if (zeros(at)) {
		kunmap_local(at);
		return PAGEONEFS_PAGE_ZEROS;
	}
	if (static_branch_likely(&have_avx2))
		sums_by_avx2(at, secret->words, &sums);
	else
		sums_by_sse2(at, secret->words, &sums);
	kunmap_local(at);
	for (i = 0; i < 8; i += 2)
		digest += fold(&sums.v[i], ending + i * sizeof(u64));
	digest ^= digest >> 37;
	digest *= 0x165667919E3779F9ULL;
	digest ^= digest >> 32;
	digest &= ~1ULL;
	return digest > PAGEONEFS_PAGE_ZEROS ? digest : PAGEONEFS_PAGE_ZEROS + 2;
}
