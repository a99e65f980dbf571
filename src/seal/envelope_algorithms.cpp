// SPDX-License-Identifier: Apache-2.0
#include "seal/envelope_algorithms.hpp"

#include "seal/envelope.hpp"
#include "seal/frame_cipher.hpp"

#include <openssl/asn1t.h>
#include <openssl/objects.h>
#include <openssl/rsa.h>

#include <algorithm>
#include <array>
#include <string>

namespace gpustasis::seal {
namespace {

using Algorithm = std::unique_ptr<X509_ALGOR, Freed<&X509_ALGOR_free>>;
using OaepParameters = std::unique_ptr<RSA_OAEP_PARAMS, Freed<&RSA_OAEP_PARAMS_free>>;

int id_of(const X509_ALGOR* algorithm) {
    const ASN1_OBJECT* id = nullptr;
    X509_ALGOR_get0(&id, nullptr, nullptr, algorithm);
    return OBJ_obj2nid(id);
}

/// What `algorithm` has for its parameters, if that is a SEQUENCE of this kind; else nullptr.
template <class Owner>
Owner parameters_of(const X509_ALGOR* algorithm, const ASN1_ITEM* kind) {
    int type = V_ASN1_UNDEF;
    const void* value = nullptr;
    X509_ALGOR_get0(nullptr, &type, &value, algorithm);
    if (type != V_ASN1_SEQUENCE)
        return nullptr;
    return Owner(static_cast<typename Owner::pointer>(
        ASN1_item_unpack(static_cast<const ASN1_STRING*>(value), kind)));
}

bool is_oaep_with_sha256(const X509_ALGOR* algorithm) {
    if (id_of(algorithm) != NID_rsaesOaep)
        return false;
    const auto found = parameters_of<OaepParameters>(algorithm, ASN1_ITEM_rptr(RSA_OAEP_PARAMS));
    if (!found || found->hashFunc == nullptr || found->maskGenFunc == nullptr)
        return false; // what is left out stands for SHA-1
    const auto mask = parameters_of<Algorithm>(found->maskGenFunc, ASN1_ITEM_rptr(X509_ALGOR));
    return id_of(found->hashFunc) == NID_sha256 && id_of(found->maskGenFunc) == NID_mgf1 && mask &&
           id_of(mask.get()) == NID_sha256 && found->pSourceFunc == nullptr;
}

bool is_ecdh_with_sha256(const X509_ALGOR* algorithm) {
    if (id_of(algorithm) != NID_dhSinglePass_stdDH_sha256kdf_scheme)
        return false;
    const auto wrap = parameters_of<Algorithm>(algorithm, ASN1_ITEM_rptr(X509_ALGOR));
    return wrap && id_of(wrap.get()) == NID_id_aes256_wrap;
}

void require_recipient(CMS_RecipientInfo* info) {
    X509_ALGOR* algorithm = nullptr;
    switch (CMS_RecipientInfo_type(info)) {
    case CMS_RECIPINFO_TRANS:
        require(CMS_RecipientInfo_ktri_get0_algs(info, nullptr, nullptr, &algorithm),
                "cannot look at a recipient");
        if (!is_oaep_with_sha256(algorithm))
            throw Error(Errc::unsupported, "envelope wraps its key otherwise than by RSAES-OAEP "
                                           "with SHA-256: it is not opened");
        break;
    case CMS_RECIPINFO_AGREE: {
        ASN1_OCTET_STRING* material = nullptr;
        require(CMS_RecipientInfo_kari_get0_alg(info, &algorithm, &material),
                "cannot look at a recipient");
        if (!is_ecdh_with_sha256(algorithm) || material != nullptr)
            throw Error(Errc::unsupported, "envelope wraps its key otherwise than by ECDH with "
                                           "SHA-256 and AES-256: it is not opened");
        break;
    }
    default:
        throw Error(Errc::unsupported,
                    "envelope has a recipient who is neither of RSA nor of EC: it is not opened");
    }
}

/// Reads DER that OpenSSL has written, value by value: there is no way to ask OpenSSL for the algorithm of an
/// AuthEnvelopedData before it uses it.
class DerReader {
public:
    explicit DerReader(Bytes bytes) : bytes_(bytes) {}

    bool next_is(unsigned tag) const {
        return !bytes_.empty() && std::to_integer<unsigned>(bytes_.front()) == tag;
    }
    /// The content of the next value. Throws Error: corrupt_data unless it has this tag.
    Bytes take(unsigned tag) {
        constexpr unsigned long_form = 0x80;
        if (!next_is(tag) || bytes_.size() < 2)
            damaged();
        auto size = std::to_integer<std::size_t>(bytes_[1]);
        std::size_t begin = 2;
        if (size >= long_form) {
            const std::size_t count = size - long_form;
            if (count == 0 || count > sizeof(std::uint32_t) || bytes_.size() - begin < count)
                damaged();
            size = 0;
            for (const std::byte byte : bytes_.subspan(begin, count))
                size = size << 8U | std::to_integer<std::size_t>(byte);
            begin += count;
        }
        if (bytes_.size() - begin < size)
            damaged();
        const Bytes content = bytes_.subspan(begin, size);
        bytes_ = bytes_.subspan(begin + size);
        return content;
    }

private:
    [[noreturn]] static void damaged() {
        throw Error(Errc::corrupt_data, "envelope is damaged: no CMS AuthEnvelopedData");
    }

    Bytes bytes_;
};

constexpr unsigned kInteger = 0x02;
constexpr unsigned kOctets = 0x04;
constexpr unsigned kObjectId = 0x06;
constexpr unsigned kSequence = 0x30;
constexpr unsigned kSet = 0x31;
constexpr unsigned kContext0 = 0xa0;       // [0], constructed
constexpr unsigned kContext1 = 0xa1;       // [1], constructed
constexpr unsigned kContext0Octets = 0x80; // [0], of an OCTET STRING
constexpr std::size_t kNonceSize = 12;

/// RFC 5083 and RFC 5084. How many bytes are encrypted: as many as there were before.
std::size_t require_content(Bytes der) {
    DerReader whole(der);
    DerReader content_info(whole.take(kSequence));
    content_info.take(kObjectId);
    DerReader wrapped(content_info.take(kContext0));
    DerReader fields(wrapped.take(kSequence));
    fields.take(kInteger);
    if (fields.next_is(kContext0)) // certificates that nobody needs
        fields.take(kContext0);
    fields.take(kSet); // the recipients
    DerReader content(fields.take(kSequence));
    content.take(kObjectId);
    DerReader algorithm(content.take(kSequence));
    const Bytes id = algorithm.take(kObjectId);
    constexpr auto aes_256_gcm = // 2.16.840.1.101.3.4.1.46
        std::to_array<unsigned char>({0x60, 0x86, 0x48, 0x01, 0x65, 0x03, 0x04, 0x01, 0x2e});
    if (!std::ranges::equal(id, std::as_bytes(std::span(aes_256_gcm))))
        throw Error(Errc::unsupported,
                    "envelope is not encrypted with AES-256-GCM: it is not opened");
    DerReader parameters(algorithm.take(kSequence));
    const std::size_t nonce_size = parameters.take(kOctets).size();
    constexpr std::array tag_size{std::byte{kTagSize}};
    const bool whole_tag =
        parameters.next_is(kInteger) && std::ranges::equal(parameters.take(kInteger), tag_size);
    const std::size_t size =
        content.next_is(kContext0Octets) ? content.take(kContext0Octets).size() : 0;
    if (fields.next_is(kContext1)) // attributes that are authenticated, too
        fields.take(kContext1);
    if (nonce_size != kNonceSize || !whole_tag || fields.take(kOctets).size() != kTagSize)
        throw Error(Errc::unsupported, "envelope has a nonce of " + std::to_string(nonce_size) +
                                           " bytes, or no tag of 16; a nonce of 12 and a tag of 16 "
                                           "are read: it is not opened");
    return size;
}

} // namespace

std::size_t require_known_algorithms(CMS_ContentInfo* cms, Bytes der) {
    const std::size_t size = require_content(der);
    STACK_OF(CMS_RecipientInfo)* const infos = CMS_get0_RecipientInfos(cms);
    const int count = sk_CMS_RecipientInfo_num(infos);
    if (count > static_cast<int>(kMaxRecipients))
        throw Error(Errc::corrupt_data,
                    "envelope has more than " + std::to_string(kMaxRecipients) + " recipients");
    for (int number = 0; number < count; ++number)
        require_recipient(sk_CMS_RecipientInfo_value(infos, number));
    return size;
}

} // namespace gpustasis::seal
